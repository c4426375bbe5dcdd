"""Offline batch jobs: JSONL in, JSONL out, on a machine, a pod or an object store; see `jkv batch --help`.

Entry points: `job.Job`, `run.run`. Must not import serve.
"""
