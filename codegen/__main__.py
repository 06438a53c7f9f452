import gc

from codegen.cli import main

gc.disable()  # nearly all that is made is needed to the end: to look for garbage took a quarter of the time
main(prog_name="python -m codegen")
