"""Evaluation of compressed caches: corpora, synthetic tasks, metrics, result files and reports."""
