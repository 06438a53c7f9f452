"""Set-up and build: `bootstrap` makes the environment, `build_extension` compiles, `toolchain` finds the compilers."""
