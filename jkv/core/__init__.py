"""The one transition of a cache, and what runs it; knows no method, no text and no file."""
