"""Python beside arrays: files, processes, the terminal, arguments."""
