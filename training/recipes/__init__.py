"""Training recipes, one module a method."""
