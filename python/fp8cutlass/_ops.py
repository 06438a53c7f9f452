"""The namespaces of this package's operators in ``torch.ops``, which a second copy in one process must not share.

``scripts/hub_layout.py`` writes another ``NAMESPACE`` into the copy that it lays out, and compiles the library for it.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = "fp8cutlass"  # of the operators that Python defines
LIBRARY = f"{NAMESPACE}_C"  # of those that the compiled library defines


def compiled() -> Any:
    """``torch.ops.fp8cutlass_C``. ``native.extension.load`` comes first."""
    return getattr(torch.ops, LIBRARY)
