"""A call from its arguments to its outputs: checks, choices, operators, and the memory of calls made before."""
