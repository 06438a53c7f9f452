"""A backend of diffusers' attention dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ...stats import Reason, count_fallback
from ..dense import Accuracy, accuracy_of, attend, effort, refusal
from .masks import visible_mask
from .parallel import METHODS, operators, spread

NAME = "fp8cutlass"
DOOR = "diffusers"
BACKENDS: dict[str, Accuracy] = {}  # those that are registered
_exchanges: dict[str, str] = {}  # and how rings of theirs exchange keys


def register(name: str = NAME, *, context_parallel: str | None = None, **accuracy: Any) -> Any:
    """Add a backend for ``model.set_attention_backend(name)`` and diffusers' ``attention_backend(name)``.

    Those two also set the default of the process; ``enable`` does not. May be called again with the same accuracy.

    Args:
        context_parallel: how devices that diffusers calls a ring exchange keys: ``gather``, the default, which gives
            the bits of one device, or ``ring``, which keeps two shards of keys on each.

    Returns:
        The member of ``AttentionBackendName``.

    Raises:
        TypeError: an unknown argument. ValueError: ``name`` is taken, or known with another accuracy.
    """
    from diffusers.models import attention_dispatch as dispatch

    chosen = accuracy_of("register", accuracy)
    if context_parallel not in (None, *METHODS):
        raise ValueError(f"context_parallel must be one of {', '.join(METHODS)}, got {context_parallel!r}")
    names = dispatch.AttentionBackendName
    if name in BACKENDS:
        if BACKENDS[name] != chosen or context_parallel not in (None, _exchanges[name]):
            held = f"{BACKENDS[name]}, context_parallel={_exchanges[name]!r}"
            raise ValueError(f"the backend {name!r} is registered with {held}: give another name")
        return names(name)
    if name in names._value2member_map_ or name != name.lower():
        raise ValueError(f"{name!r} cannot be a backend's name: it is taken, or not in lower case")
    member = _member(names, name)
    registry = dispatch._AttentionBackendRegistry
    native = registry._backends[names.NATIVE]
    constraints = [dispatch._check_device, dispatch._check_shape]
    registry.register(member, constraints, supports_context_parallel=True)(
        _backend(native, dispatch._templated_context_parallel_attention, chosen, context_parallel or METHODS[0])
    )
    registry._supported_arg_names[member] = _AllNames(registry._supported_arg_names[member])
    BACKENDS[name], _exchanges[name] = chosen, context_parallel or METHODS[0]
    return member


def _member(names: Any, name: str) -> Any:
    """A new member of the enum, which has no public way to get one."""
    member = str.__new__(names, name)
    member._name_, member._value_, member.__objclass__ = name.upper(), name, names
    member._sort_order_ = len(names._member_names_)
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    names._member_names_.append(member._name_)
    return member


class _AllNames(set[str]):
    """The dispatcher drops keywords that are not in here. None is dropped, so that an unknown one is seen."""

    def __contains__(self, name: object) -> bool:
        return True


def _backend(native: Any, parallel: Any, accuracy: Accuracy, method: str) -> Any:
    def fp8cutlass_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
        **unknown: Any,
    ) -> Any:
        """(B, S, H, D) in and out; the LSE, if asked for, (B, S, H)."""
        given = [name for name, value in unknown.items() if value is not None]
        if _parallel_config is not None:
            if given:
                raise UnsupportedError(f"context parallel attention does not take {', '.join(given)}")
            operands = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
            if (reason := refusal(query, key, value, attn_mask, dropout_p)) is None:
                given_on = query, key, value, is_causal, scale, enable_gqa, return_lse, _parallel_config
                if (result := spread(accuracy, DOOR, method, *given_on)) is not None:
                    return result
                return parallel(*operands, **operators(accuracy, DOOR), _parallel_config=_parallel_config)
            count_fallback(DOOR, "parallel", reason, work=effort(query, key, value, is_causal, "bshd"), at=query)
            return native(*operands, _parallel_config)
        seen = visible_mask(attn_mask)
        result = attend(
            DOOR, "", query, key, value,
            attn_mask=seen, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            layout="bshd", return_lse=return_lse, reason=Reason.KEYWORD if given else None, accuracy=accuracy,
        )  # fmt: skip
        if result is None:  # as the dispatcher would have called it: without unknown keywords
            return native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
        return (result[0], result[1].transpose(1, 2)) if return_lse else result

    return fp8cutlass_attention
