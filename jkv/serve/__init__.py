"""HTTP in the words of OpenAI's API, over running batches: one for each cache that requests ask for."""
