"""A tiny attention on one device, and one over pages, against float64."""

from __future__ import annotations

import math

SHAPE = (1, 2, 200, 64)  # more than a key block, and no multiple of any tile
# Of the relative L2 error in the default mode from bf16; these values give 0.047, most of it from quantising the
# operands. A wrong tile, mask or layout makes many times that.
LIMIT = 0.08
PAGED = (2, 3, 8, 2, 64)  # sequences, query tokens of each, heads of Q, of K and V, head_dim
KEYS, PAGE = (100, 37), 16  # of each sequence; more than a page, and no multiple of one


def error_on(device: str) -> float:
    """The relative L2 error of causal attention of SHAPE on ``device``, "cpu" or "cuda:N"; NaN counts as infinite.

    Raises what attention raises.
    """
    import torch

    from .. import attention
    from ..accuracy.measures import relative_l2
    from ..accuracy.reference import attention64

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SHAPE, generator=generator).to(torch.bfloat16) for _ in range(3))
    expected = attention64(q, k, v, SHAPE[3] ** -0.5, 0).out
    out = attention(q.to(device), k.to(device), v.to(device), is_causal=True)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"attention returned {type(out).__name__}")
    error = relative_l2(out.cpu(), expected)
    return math.inf if math.isnan(error) else error


def paged_error_on(device: str) -> float:
    """The relative L2 error of ``attention_with_kvcache`` over a cache that was just appended to; NaN is infinite.

    Raises what append and attention raise.
    """
    import torch

    from .. import PagedKVCache, attention_with_kvcache
    from ..accuracy.measures import relative_l2
    from ..accuracy.reference import attention64

    sequences, tokens, heads, kv_heads, head_dim = PAGED
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, head_dim, generator=generator).to(torch.bfloat16)

    columns = -(-max(KEYS) // PAGE)
    cache = PagedKVCache(sequences * columns, kv_heads, head_dim, PAGE, v_scale="pow2", device=device)
    table = torch.randperm(sequences * columns, generator=generator).view(sequences, columns).int()
    q, k, v = draw(sequences, tokens, heads), draw(sum(KEYS), kv_heads), draw(sum(KEYS), kv_heads)
    key = [torch.arange(n) for n in KEYS]
    slots = torch.cat([table[s].long()[at // PAGE] * PAGE + at % PAGE for s, at in enumerate(key)])
    cache.append(k.to(device), v.to(device), slots.to(device))
    lengths = torch.tensor(KEYS, dtype=torch.int32).to(device)
    out = attention_with_kvcache(q.to(device), cache, page_table=table.to(device), cache_seqlens=lengths)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"attention_with_kvcache returned {type(out).__name__}")
    expected, begin = [], 0
    for s, n in enumerate(KEYS):
        of = slice(begin, begin + n)
        one, keys, values = (x.transpose(0, 1)[None] for x in (q[s], k[of], v[of]))
        expected.append(attention64(one, keys, values, head_dim**-0.5, n - tokens).out[0].transpose(0, 1))
        begin += n
    error = relative_l2(out.cpu(), torch.stack(expected))
    return math.inf if math.isnan(error) else error
