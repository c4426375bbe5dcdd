"""Benchmarks: caches against each other, against other engines, and against the limits of the hardware."""
