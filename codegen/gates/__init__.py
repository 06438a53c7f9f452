"""Gates on compiled code: registers, spills, shared memory, occupancy, instruction mix. No GPU is needed.

Needs nvcc, the CUTLASS headers and nvdisasm, which `scripts/toolchain.py` finds; the rest of the generator does not.
"""
