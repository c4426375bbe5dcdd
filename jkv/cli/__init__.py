"""The `jkv` command line."""
