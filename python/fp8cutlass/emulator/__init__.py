"""The kernels in torch operations on the CPU: the specification of what they compute."""
