from .command import accuracy

accuracy(prog_name="python -m fp8cutlass.accuracy")
