"""FP8 attention for PyTorch on Ada and Hopper.

``attention`` takes the place of ``torch.nn.functional.scaled_dot_product_attention``; ``pack_kv`` makes keys and values
ready for many calls; ``quantize`` makes FP8 tensors and their descales, ``StaticScale`` and ``DelayedScale`` descales
that are known before the tensor is; ``supports`` and ``explain`` say whether and by which kernel a call would be
served, and ``tune`` measures which is the fastest on this card. On CPU tensors an emulator of the kernels runs.
"""

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

from ._version import __version__

__all__ = [
    "DelayedScale",
    "PackedKV",
    "StaticScale",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_varlen",
    "explain",
    "pack_kv",
    "quantize",
    "supports",
    "tune",
]


def _is_command() -> bool:
    """Whether the process is the command line: the script `fp8cutlass`, or `python -m fp8cutlass` looking for it."""
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":
        return ("-m", "fp8cutlass") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return PurePath(program).name in ("fp8cutlass", "fp8cutlass.exe")


# The command line answers `--help` without torch, and says what is wrong with a torch that does not import: there the
# names are loaded when the first of them is used. Everywhere else importing the package registers its operators.
if TYPE_CHECKING or not _is_command():
    from .api import attention, explain, supports
    from .errors import UnsupportedError
    from .packed import PackedKV
    from .packing import pack_kv
    from .quantize import quantize
    from .scaling import DelayedScale, StaticScale
    from .tuner import tune
    from .varlen import attention_varlen
else:

    def __getattr__(name: str) -> object:
        # All of them at once: a submodule that is imported alone would leave its own name here, as `quantize` does.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        for home in ("api", "errors", "packed", "packing", "quantize", "scaling", "tuner", "varlen"):
            module = import_module(f".{home}", __name__)
            globals().update((public, getattr(module, public)) for public in __all__ if hasattr(module, public))
        return globals()[name]
