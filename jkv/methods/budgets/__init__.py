"""Budgets: how many tokens each layer and head may keep."""
