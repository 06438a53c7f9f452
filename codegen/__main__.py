from codegen.cli import main

main(prog_name="python -m codegen")
