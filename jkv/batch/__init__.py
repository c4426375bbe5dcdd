"""Many prompts from a file, answered in batches whose rows come and go; see `jkv batch --help`."""
