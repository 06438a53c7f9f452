"""The package's one exception, and the kind of it that torch's own attention can serve.

Neither has an ``__init__``: torch.compile traces through raising and catching them only so.
"""

from __future__ import annotations


class UnsupportedError(ValueError):
    """A call that no kernel of this package can serve, raised before anything is launched. Its arguments are the
    reasons, one sentence each: what is wrong with the call, which kernels refuse it and why, the remedy."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons, in that order."""
        return self.args

    def __str__(self) -> str:
        return "; ".join(self.args)


class NoKernelError(UnsupportedError):
    """The call is well formed and only beyond these kernels: a mask, dropout, a gradient, a head_dim, a combination
    that is not offered, a card for which nothing is built. ``fallback="sdpa"`` serves it."""
