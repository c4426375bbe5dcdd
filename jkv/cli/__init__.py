"""Everything that talks to a terminal: the commands of `jkv`."""
