"""The public functions: thin, with all docstrings."""
