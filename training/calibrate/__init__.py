"""Statistics of a model that methods need, measured without a gradient; `jkv calibrate`."""
