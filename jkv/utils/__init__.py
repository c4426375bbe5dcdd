"""Utilities without arrays: files, processes, terminal, argument validation."""
