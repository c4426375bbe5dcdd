"""A job whose rows are prefilled by some processes and decoded by others; see `jkv batch --stages`."""
