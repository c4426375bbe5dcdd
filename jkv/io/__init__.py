"""Model and file I/O: hubs, object stores, GGUF, safetensors, tokenizers, trained weights."""
