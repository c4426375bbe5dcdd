"""Continuous batching: requests, the scheduler, batched prefill and decode; `jkv.serve` and `jkv.batch` stand on it.

Entry points: `scheduler.arrange`, `continuous_batch.Running`. Must not import serve or batch.
"""
