"""Arguments that a user gets wrong, each refused by name; and what torch's transforms and fake tensors get.

Regressions these catch: a word that nothing knows and everybody ignores; a length, page or size out of range that is
clamped in silence; an error from inside of torch for a plain mistake; shapes of a compiled call that are compared as
objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8cutlass as fp8
from fp8cutlass import BlockMask, PagedKVCache, UnsupportedError, attention, attention_varlen, supports
from fp8cutlass.errors import NoKernelError
from fp8cutlass.integrations.sdpa import use_fp8

ENDS = torch.tensor([0, 20, 50], dtype=torch.int32)
X = torch.randn(50, 4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ragged(*longest: Any, ends: torch.Tensor = ENDS, x: torch.Tensor = X, **rest: Any) -> Any:
    return attention_varlen(x, x, x, ends, ends, *(longest or (30, 30)), **rest)


def cache() -> PagedKVCache:
    return PagedKVCache(num_pages=4, kv_heads=2, head_dim=64, page_size=16)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a kernel that there is not": (lambda: ragged(kernel="bogus"), "kernel='bogus' is not in the manifest"),
    "a kernel of another kind": (
        lambda: ragged(kernel="sm89_fwd_d64_m64n128w4_s2_block_causal_e4m3_bf16_linear"), "does not serve"),
    "less than no keys": (lambda: ragged(seqused_k=ints(-7, -7)), "seqused_k must be 0 to the tokens of a sequence"),
    "less than no rows": (lambda: ragged(seqused_q=ints(20, -1)), "seqused_q must be 0"),
    "more keys than there are": (lambda: ragged(30, 31, seqused_k=ints(20, 31)), "seqused_k must be 0"),
    "a bound that is no integer": (lambda: ragged(30.0, 30), "max_seqlen_q must be an integer, at least 0, got 30.0"),
    "parts that are not packed": (lambda: fp8.PackedKV.joined([1]), "parts must be PackedKV, one is int"),
    "a page size in words": (
        lambda: PagedKVCache.from_tensor((X.byte()[None],) * 2, page_size="16"),
        "page_size must be an integer, at least 1, got '16'",
    ),
    "half a head": (lambda: fp8.alibi_slopes(2.5), "heads must be a positive integer, got 2.5"),
    "slopes that are none": (lambda: fp8.alibi_bias(None, 3, 3), "slopes must be a tensor, got NoneType"),
    "no bound": (lambda: ragged(30, None), "max_seqlen_k must be an integer, at least 0, got None"),
    "a bound below 0": (lambda: ragged(-1, 30), "max_seqlen_q must be an integer, at least 0, got -1"),
    "no sequence": (lambda: ragged(0, 0, ends=ints(0), x=X[:0]), "cu_seqlens_q must be of one sequence at least"),
    "no end": (lambda: ragged(0, 0, ends=ints(), x=X[:0]), "cu_seqlens_k must be of one sequence at least"),
    "a page that is not there": (lambda: cache().dequantise(ints(99)[None], ints(16)), "must name pages 0 to 3"),
    "a length below 0": (lambda: cache().dequantise(ints(3)[None], ints(-5)), "must be 0 to 16, got -5"),
    "a length beyond the table": (lambda: cache().dequantise(ints(3)[None], ints(17)), "must be 0 to 16, got 17"),
    "a number for lengths": (lambda: cache().dequantise(ints(3)[None], 4), "lens must be"),  # type: ignore[arg-type]
    "a layer that there is not": (lambda: cache().dequantise(ints(3)[None], ints(4), 1), "layer must be 0 to 0"),
    "two nodes above each other": (lambda: BlockMask.tree(torch.tensor([1, 0]), 5), "parents has a cycle"),
    "a node above itself": (lambda: BlockMask.tree(torch.tensor([-1, 0, 2]), 5), "parents has a cycle"),
    "a sparse mask": (lambda: BlockMask.from_dense(torch.ones(4, 4).bool().to_sparse()), "mask must be a dense tensor"),
    "an alignment that is a word": (
        lambda: BlockMask.window(4, 4, 1, 1, bottom_right="x"), "bottom_right must be True or False"),  # type: ignore[arg-type]
    "a shape of a plan": (
        lambda: fp8.plan_attention((2, -1, 4, 64), cache(), page_table=ints(0, 1)[:, None], cache_seqlens=3),
        "q must be a tensor of queries or its shape"),
    "a precision that is none": (lambda: use_fp8(precision="acurate").__enter__(), "precision must be one of fast"),
    "a scaling that is none": (lambda: use_fp8(scaling="blok").__enter__(), "scaling must be one of tensor"),
    "a switch that is a word": (lambda: use_fp8(smooth_k="yes").__enter__(), "smooth_k must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused_by_name(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(UnsupportedError) as caught:
        call()
    assert text in str(caught.value), str(caught.value)


def test_a_ragged_batch_runs_the_kernel_that_it_names() -> None:
    kernel = "sm90a_fwd_d64_m128n128w8_s4_block_causal_e4m3_bf16_exp2_pingpong_solo_ragged"
    named = ragged(causal=True, kernel=kernel, precision="accurate")
    assert (named.float() - ragged(causal=True).float()).norm() < 0.1 * named.float().norm()
    assert not torch.equal(named, ragged(causal=True))


def test_a_tree_of_many_generations_has_no_cycle() -> None:
    assert BlockMask.tree(torch.arange(-1, 199), 200).rows == 200


def test_vmap_is_refused_and_falls_back() -> None:
    q = torch.randn(3, 2, 4, 40, 64).bfloat16()
    k = torch.randn(2, 4, 50, 64).bfloat16()
    with pytest.raises(NoKernelError, match=r"query is mapped over by torch\.vmap"):
        torch.vmap(lambda a: attention(a, k, k))(q)
    served = []
    torch.vmap(lambda a: served.append(supports(a, k, k)[0]) or a)(q)
    assert served == [False]
    plain = torch.vmap(lambda a: F.scaled_dot_product_attention(a, k, k))(q)
    with torch.no_grad(), use_fp8():
        assert torch.equal(torch.vmap(lambda a: F.scaled_dot_product_attention(a, k, k))(q), plain)
    assert torch.vmap(lambda a: attention(a, k, k, fallback="sdpa"))(q).shape == q.shape


@pytest.mark.parametrize("mask", [torch.ones(40, 70).bool().tril(20), BlockMask.window(40, 70, 3, 3)])
def test_masks_of_fixed_sizes_in_calls_that_are_compiled_with_dynamic_ones(mask: Any) -> None:
    compiled = torch.compile(lambda q, k: attention(q, k, k, mask), fullgraph=True, backend="eager", dynamic=True)
    q, k = torch.randn(2, 4, 40, 64).bfloat16(), torch.randn(2, 4, 70, 64).bfloat16()
    assert torch.equal(compiled(q, k), attention(q, k, k, mask))


def test_fake_tensors_have_no_values_to_look_at() -> None:
    with FakeTensorMode():
        ends = torch.empty(3, dtype=torch.int32)
        x = torch.empty(50, 4, 64, dtype=torch.bfloat16)
        assert attention_varlen(x, x, x, ends, ends, 30, 30).shape == x.shape
