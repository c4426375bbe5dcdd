"""Disaggregated jobs: some processes prefill rows, others decode them; see `jkv batch --stages`."""
