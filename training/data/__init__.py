"""Training data: corpora, synthetic requests and look-ups."""
