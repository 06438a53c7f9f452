"""``python -m fp8cutlass`` is the command ``fp8cutlass``."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="fp8cutlass")
