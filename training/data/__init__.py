"""Training texts: corpora, synthetic look-ups and synthetic requests."""
