"""Evaluation: texts, tasks and scores that need no network and no model."""
