"""FP8 attention for PyTorch on Ada and Hopper.

* ``attention`` takes the place of ``torch.nn.functional.scaled_dot_product_attention``. ``attention_varlen`` serves
  ragged batches.
* ``attention_with_kvcache`` and ``PagedKVCache`` keep keys and values in pages, for the serving of language models.
  ``plan_attention`` cuts the work of a step once for all layers.
* ``BlockMask`` is a mask that is packed once: padding, documents, trees, blocks. ``alibi_bias`` is one that is added.
* ``pack_kv`` quantises and packs keys and values once for many calls. ``merge_attention`` makes one result of two over
  different keys.
* ``quantize`` makes FP8 tensors and their descales. ``StaticScale`` and ``DelayedScale`` make descales that are known
  before the tensor is.
* ``supports`` and ``explain`` say whether a kernel serves a call, and which; ``supports_kvcache`` and
  ``explain_kvcache`` say it of ``attention_with_kvcache``. ``tune`` measures which one is the fastest on this card.
* ``served`` says how many calls of a model ran in FP8 and why the others did not (``stats``).

CPU tensors run an emulator of the kernels.
"""

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

from ._version import __version__

__all__ = [
    "BlockMask",
    "DelayedScale",
    "PackedKV",
    "PagedKVCache",
    "StaticScale",
    "UnsupportedError",
    "__version__",
    "alibi_bias",
    "alibi_slopes",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "explain",
    "explain_kvcache",
    "merge_attention",
    "pack_kv",
    "plan_attention",
    "quantize",
    "served",
    "supports",
    "supports_kvcache",
    "tune",
]


HOMES = (
    "api.ask",
    "api.ask_kvcache",
    "api.attention",
    "api.kvcache",
    "api.merge",
    "api.pack",
    "api.plan_kvcache",
    "api.tune",
    "api.varlen",
    "cache.packed",
    "cache.paged",
    "errors",
    "masks.alibi",
    "masks.block_mask",
    "quant.quantize",
    "quant.scaling",
    "stats",
)  # modules of the public names


def _is_command() -> bool:
    """Whether the process is the command line: the script `fp8cutlass`, or `python -m fp8cutlass` looking for it."""
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":
        return ("-m", "fp8cutlass") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return PurePath(program).name in ("fp8cutlass", "fp8cutlass.exe")


# The command line answers `--help` without torch, and says what is wrong with a torch that does not import: there the
# names are loaded when the first of them is used. Everywhere else importing the package registers its operators.
if TYPE_CHECKING or not _is_command():
    from .api.ask import explain, supports
    from .api.ask_kvcache import explain_kvcache, supports_kvcache
    from .api.attention import attention
    from .api.kvcache import attention_with_kvcache
    from .api.merge import merge_attention
    from .api.pack import pack_kv
    from .api.plan_kvcache import plan_attention
    from .api.tune import tune
    from .api.varlen import attention_varlen
    from .cache.packed import PackedKV
    from .cache.paged import PagedKVCache
    from .errors import UnsupportedError
    from .masks.alibi import alibi_bias, alibi_slopes
    from .masks.block_mask import BlockMask
    from .quant.quantize import quantize
    from .quant.scaling import DelayedScale, StaticScale
    from .stats import served
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        for home in HOMES:
            module = import_module(f".{home}", __name__)
            globals().update((public, getattr(module, public)) for public in __all__ if hasattr(module, public))
        return globals()[name]
