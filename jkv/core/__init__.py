"""The values of a cache and their one transition; knows no method, no text and no file."""
