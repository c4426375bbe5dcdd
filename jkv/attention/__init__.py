"""What a query reads of a cache: exact tokens, codes tile by tile, and the evidence of a score from both."""
