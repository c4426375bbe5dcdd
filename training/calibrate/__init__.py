"""Calibration (`jkv calibrate`): model statistics that cache methods need, measured without training."""
