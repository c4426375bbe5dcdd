"""Distillation losses and warm starts."""
