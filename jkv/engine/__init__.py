"""Continuous batching: requests, the scheduler, batched prefill and batched decode.

Shared by `jkv.serve` and `jkv.batch`. Entry points: `scheduler.arrange`, `continuous_batch.Running`. Must not import
serve or batch.
"""

MOST_NEW = 1 << 15  # generated tokens per row where the cache sets no limit; here, since commands show it without jax
