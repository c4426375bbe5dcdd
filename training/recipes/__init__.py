"""Training recipes, one module per method."""
