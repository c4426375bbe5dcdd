"""Models and files: hubs, object stores, GGUF, safetensors, tokenizers, trained weights."""
