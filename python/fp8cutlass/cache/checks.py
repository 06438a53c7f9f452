"""What is wrong with the arguments of a paged cache, in words; and numbers that the host can look at."""

from __future__ import annotations

import torch

from ..checking import looks_at
from ..dtypes import HALF_DTYPES
from ..errors import UnsupportedError
from ..quant.descale import SMALLEST, refuse_host
from ..quant.rotate import rotated_columns
from .pages import FORMATS, VECTOR

V_SCALES = ("static", "pow2")
INTEGERS = (torch.int32, torch.int64)
Descale = torch.Tensor | float | None


def wrong_sizes(sizes: dict[str, object]) -> list[str]:
    """Those that are no counts of something."""
    return [
        f"{name} must be an integer, at least 1, got {size!r}"
        for name, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1
    ]


def check_new(sizes: dict[str, object], format: str, v_scale: str, k_descale: object, v_descale: object) -> None:
    """The arguments of a cache to be made."""
    wrong = wrong_sizes(sizes)
    if format not in FORMATS:
        wrong.append(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if v_scale not in V_SCALES:
        wrong.append(f"v_scale must be one of {', '.join(V_SCALES)}, got {v_scale!r}")
    if wrong:
        raise UnsupportedError(*wrong)
    native = format == "native"
    if sizes["head_dim"] % VECTOR:  # type: ignore[operator]
        wrong.append(f"head_dim must be a multiple of {VECTOR}, got {sizes['head_dim']}")
    if native and sizes["page_size"] % VECTOR:  # type: ignore[operator]
        wrong.append(f"page_size must be a multiple of {VECTOR} in format native, got {sizes['page_size']}")
    if native and k_descale is not None:
        wrong.append("k_descale is for formats nhd and hnd: format native finds one for each token and head")
    if v_scale == "pow2" and (not native or v_descale is not None):
        wrong.append("v_scale='pow2' finds V's descales in format native: it goes with no v_descale")
    if wrong:
        raise UnsupportedError(*wrong)


def static_descale(name: str, given: object, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A descale that the caller knows, spread over ``shape``, which is (layers, kv_heads) or (sequences, kv_heads);
    UnsupportedError for anything else."""
    descale = known_descale(name, given, shape, device)
    if not isinstance(descale, torch.Tensor):
        return torch.full(shape, descale, device=device)
    return limited(descale).expand(shape)


def known_descale(name: str, given: object, shape: tuple[int, int], device: torch.device) -> torch.Tensor | float:
    """The same as it was given: a number, or a tensor of (), (1,), ``shape[1:]`` or ``shape``."""
    given = 1.0 if given is None else given
    if not isinstance(given, torch.Tensor):
        if (reason := refuse_host(name, given)) is not None:
            raise UnsupportedError(reason)
        return float(given)  # type: ignore[arg-type]
    accepted = ((), (1,), shape[1:], shape)
    if given.dtype != torch.float32 or tuple(given.shape) not in accepted or given.device != device:
        raise UnsupportedError(
            f"{name} must be a float, or float32 on {device} of shape {' or '.join(map(str, accepted[1:]))}, "
            f"got {given.dtype}, {tuple(given.shape)} on {given.device}"
        )
    return given


def limited(descale: torch.Tensor) -> torch.Tensor:
    """As it is multiplied by. The kernels of decode do this themselves."""
    return descale.clamp(SMALLEST, 1 / SMALLEST)


def settled_mean(k_mean: object, shape: tuple[int, int, int], device: torch.device) -> torch.Tensor | None:
    """(layers, kv_heads, head_dim) of the mean of keys, or None."""
    if k_mean is None:
        return None
    accepted = (shape[1:], shape)
    if not isinstance(k_mean, torch.Tensor) or k_mean.dtype != torch.float32 or tuple(k_mean.shape) not in accepted:
        raise UnsupportedError(f"k_mean must be a float32 tensor of shape {accepted[0]} or {accepted[1]}")
    if k_mean.device != device:
        raise UnsupportedError(f"k_mean is on {k_mean.device}, the cache is on {device}")
    return k_mean.expand(shape)


def check_hadamard(hadamard: object, head_dim: int) -> None:
    """Whether keys of ``head_dim`` can be rotated, where that is asked for."""
    columns = rotated_columns(head_dim)
    if not isinstance(hadamard, bool):
        raise UnsupportedError(f"hadamard must be True or False, got {hadamard!r}")
    if hadamard and (columns & (columns - 1) or head_dim > 256):
        raise UnsupportedError(
            f"hadamard needs a head_dim that is a power of two or three times one, up to 256, got {head_dim}"
        )


def token_dtypes(format: str, changed: bool) -> tuple[torch.dtype, ...]:
    """Of tokens that ``PagedKVCache.append`` takes. E4m3 is copied: to pages without descales, where keys are not
    ``changed`` before."""
    quantised = (*HALF_DTYPES, torch.float32)
    return quantised if changed or format == "native" else (*quantised, torch.float8_e4m3fn)


def wrong_tokens(
    k: object,
    v: object,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES,
) -> list[str]:
    """Of tokens to be appended."""
    *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    wrong = []
    shapes = []
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or tuple(x.shape[1:]) != (kv_heads, head_dim):
            got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            wrong.append(f"{name} must be (tokens, {kv_heads}, {head_dim}), got {got}")
            continue
        shapes.append(x.shape[0])
        if x.dtype not in dtypes:
            wrong.append(f"{name} must be {', '.join(first)} or {last}, got {x.dtype}: append quantises")
        if x.device != device:
            wrong.append(f"{name} is on {x.device}, the cache is on {device}")
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        wrong.append(f"k and v differ in tokens: {shapes[0]} and {shapes[1]}")
    return wrong


def wrong_numbers(
    name: str, x: object, device: torch.device, count: int | None = None, dtypes: tuple[torch.dtype, ...] = INTEGERS
) -> list[str]:
    """Of a list of numbers on the device."""
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(x, torch.Tensor) or x.dim() != 1 or x.dtype not in dtypes or x.device != device:
        return [f"{name} must be a one-dimensional {kinds} tensor on {device}"]
    if count is not None and x.shape[0] != count:
        return [f"{name} must have {count} elements, got {x.shape[0]}"]
    return []


def check_read(table: object, lens: object, pages: int, page_size: int, device: torch.device) -> None:
    """What says which tokens are read: (sequences, pages) int32, and (sequences,) int32 or int64. The host looks at
    values where ``checking`` says so: of pages at those that the lengths reach."""
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.dtype != torch.int32 or table.device != device:
        raise UnsupportedError(f"page_table must be a two-dimensional int32 tensor on {device}")
    if wrong := wrong_numbers("lens", lens, device, table.shape[0]):
        raise UnsupportedError(*wrong)
    if not looks_at(table):
        return
    room = table.shape[1] * page_size
    for s, (row, length) in enumerate(zip(table.tolist(), lens.tolist(), strict=True)):  # type: ignore[attr-defined]
        if not 0 <= length <= room:
            raise UnsupportedError(f"lens of sequence {s} must be 0 to {room}, got {length}")
        if wrong := wrong_pages(s, row[: -(-length // page_size)], pages):
            raise UnsupportedError(*wrong)


def wrong_pages(sequence: int, named: list[int], pages: int) -> list[str]:
    """Of the pages that a sequence names, where there are so many."""
    outside = [page for page in named if not 0 <= page < pages]
    return [f"page_table of sequence {sequence} must name pages 0 to {pages - 1}, got {outside[0]}"] if outside else []


def wrong_rotary(cos: object, sin: object, interleaved: object, head_dim: int, device: torch.device) -> list[str]:
    """Of the tables of a rotary embedding, both or none."""
    if not isinstance(interleaved, bool):
        return [f"rotary_interleaved must be True or False, got {interleaved!r}"]
    if cos is None and sin is None:
        return []
    if not isinstance(cos, torch.Tensor) or not isinstance(sin, torch.Tensor):
        return ["rotary_cos and rotary_sin go together, two tensors"]
    if cos.dim() != 2 or cos.shape != sin.shape or not cos.shape[0]:
        return [f"rotary_cos and rotary_sin must be (S, R / 2), got {tuple(cos.shape)} and {tuple(sin.shape)}"]
    wrong = []
    if cos.shape[1] % 8 or not 0 < 2 * cos.shape[1] <= head_dim:
        wrong.append(f"a rotary embedding turns a multiple of 16 columns up to {head_dim}, got {2 * cos.shape[1]}")
    if not cos.is_floating_point() or not sin.is_floating_point():
        wrong.append(f"rotary_cos and rotary_sin must be floating point, got {cos.dtype} and {sin.dtype}")
    if cos.device != device or sin.device != device:
        wrong.append(f"rotary_cos and rotary_sin must be on {device}")
    return wrong


def check_places(name: str, x: torch.Tensor, limit: int, least: int) -> None:
    """Places on the host that are written: ``least`` to ``limit`` - 1, none twice; -1 is none."""
    places = x.tolist()
    wrong = []
    outside = sorted({n for n in places if not least <= n < limit})
    if outside:
        wrong.append(f"{name} must be {least} to {limit - 1}, got {', '.join(map(str, outside[:4]))}")
    written = [n for n in places if n >= 0]
    if len(set(written)) < len(written):
        twice = sorted({n for n in written if written.count(n) > 1}) if len(written) < 4096 else []
        wrong.append(f"{name} has a number twice{': ' if twice else ''}{', '.join(map(str, twice[:4]))}")
    if wrong:
        raise UnsupportedError(*wrong)
