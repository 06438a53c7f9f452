"""FP8 attention for PyTorch on Ada and Hopper.

``attention`` takes the place of ``torch.nn.functional.scaled_dot_product_attention``; ``quantize`` makes FP8 tensors
and their descales; ``supports`` and ``explain`` say whether and by which kernel a call would be served. On CPU
tensors an emulator of the kernels runs.
"""

from ._version import __version__
from .api import attention, explain, supports
from .errors import UnsupportedError
from .quantize import quantize

__all__ = ["UnsupportedError", "__version__", "attention", "explain", "quantize", "supports"]
