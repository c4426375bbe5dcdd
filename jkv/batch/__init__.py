"""Many prompts from a file, answered in batches whose rows come and go; see `jkv batch --help`."""

MOST_NEW = 1 << 15  # new tokens of a row, where the cache has no limit of its own
