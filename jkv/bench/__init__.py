"""How fast this machine runs: caches beside each other, beside transformers, and against what the memory allows."""
