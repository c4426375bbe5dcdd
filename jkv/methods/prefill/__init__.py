"""Prefills beyond one dense pass: token pruning, deferred compression, prompt compression."""
