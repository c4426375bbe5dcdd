"""Merging: where evicted tokens go instead of being dropped."""
