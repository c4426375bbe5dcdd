"""The rows of the catalogue, by family."""
