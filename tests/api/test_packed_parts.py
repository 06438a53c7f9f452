"""Packed keys and values that are taken apart, cut and joined: the bits of those that were packed as one.

Regressions these catch: a part that begins inside a block, descales of other keys, a form that depends on how many keys
a shard has, tensors of another form that are taken for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import randn

from fp8cutlass import PackedKV, UnsupportedError, attention, pack_kv

WIDE = "sm90a_fwd_d128_m128n192w8_s3_block_full_e4m3_bf16_linear_pingpong_solo"  # blocks of 192 keys


def operands(keys: int, head_dim: int = 64, batch: int = 2) -> Any:
    return randn(batch, 4, 40, head_dim, seed=1), *(randn(batch, 2, keys, head_dim, seed=seed) for seed in (2, 3))


def equal(a: PackedKV, b: PackedKV) -> bool:
    found, want = a.tensors(), b.tensors()
    return list(found) == list(want) and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("scaling", ["block", "token", "head", "tensor"])
@pytest.mark.parametrize("transforms", [{}, {"smooth_k": True, "hadamard": True}], ids=str)
def test_parts_of_keys_and_heads(scaling: str, transforms: dict[str, Any]) -> None:
    q, k, v = operands(500)
    packed = pack_kv(k, v, scaling=scaling, **transforms)
    whole = attention(q, packed, enable_gqa=True)
    for head in (0, 1) if scaling != "tensor" else ():  # there Q of fewer heads has another descale
        some = packed.heads(head, 1)
        assert torch.equal(
            attention(q[:, 2 * head : 2 * head + 2], some, enable_gqa=True), whole[:, 2 * head : 2 * head + 2]
        )
    for start, tokens in ((0, 128), (128, 256), (256, 244), (0, 500), (384, 0)):
        part = packed.narrow(start, tokens)
        assert part.shape == (2, 2, tokens, 64) and equal(part.rebuilt(part.tensors()), part)
        assert {name: (tuple(x.shape), x.dtype) for name, x in part.tensors().items()} == packed.shapes(tokens)
        # Where the mask hides all other keys, the whole gives what the part gives: the first keys.
        if start == 0 and tokens:
            rows = q[:, :, :1].expand(-1, -1, 1, -1)
            masked = attention(rows, packed, enable_gqa=True, is_causal=True, causal_offset=tokens - 1)
            causal = attention(rows, part, enable_gqa=True, is_causal=True, causal_offset=tokens - 1)
            assert torch.equal(masked, causal)


@pytest.mark.parametrize("key_block", [128, 192])
def test_shards_join_to_what_is_packed_as_one(key_block: int) -> None:
    head_dim = 128
    q, k, v = operands(900, head_dim)
    made: dict[str, Any] = {"kernel": WIDE} if key_block == 192 else {"key_block": 128, "query_shape": q.shape}
    whole = pack_kv(k, v, **made)
    assert whole.key_block == key_block and whole.grid == (384 if key_block == 192 else 128)
    ends = (0, 384, 384, 768, 900)
    parts = [pack_kv(k[:, :, a:b], v[:, :, a:b], keys=900, **made) for a, b in zip(ends, ends[1:], strict=False)]
    assert len({part.kernel for part in parts}) == 1
    joined = PackedKV.joined(parts)
    assert equal(joined, whole) and joined.signature == whole.signature
    assert equal(PackedKV.joined([whole.narrow(0, 384), whole.narrow(384, 516)]), whole)
    want = attention(q, k, v, enable_gqa=True, kernel=whole.kernel)
    assert torch.equal(attention(q, joined, enable_gqa=True, kernel=whole.kernel), want)
    assert PackedKV.joined(parts[:1]) is parts[0]


def test_the_kernel_does_not_depend_on_the_shard() -> None:
    q, k, v = operands(700)
    made = {pack_kv(k[:, :, :n], v[:, :, :n], query_shape=q.shape, keys=7000).kernel for n in (0, 1, 128, 700)}
    assert len(made) == 1 and made == {
        pack_kv(*operands(7000, batch=1)[1:], query_shape=(1, 4, 40, 64), keys=7000).kernel
    }


def test_what_is_refused() -> None:
    _, k, v = operands(500)
    packed = pack_kv(k, v)
    cases: list[tuple[Any, str]] = [
        (lambda: packed.narrow(64, 128), "cut between multiples of 128, got 64 to 192 of 500"),
        (lambda: packed.narrow(0, 130), "cut between multiples of 128"),
        (lambda: packed.narrow(0, 501), "lie within the 500 keys"),
        (lambda: packed.heads(1, 2), "lie within the 2 heads"),
        (lambda: packed.rebuilt({}), "tensors must be k_descale, v_descale, k, v"),
        (lambda: packed.rebuilt(packed.tensors() | {"k": packed.k[..., :32]}), "k must be torch.uint8 of shape"),
        (lambda: packed.rebuilt(packed.tensors() | {"v": packed.v.mT}), "v must be torch.uint8 of shape"),
        (lambda: packed.rebuilt(packed.tensors() | {"k_descale": packed.k_descale.double()}), "k_descale must be"),
        (lambda: PackedKV.joined([]), "one PackedKV at least"),
        (lambda: PackedKV.joined([packed, packed]), "500 keys end between multiples of 128"),
        (lambda: PackedKV.joined([packed, pack_kv(k, v, precision="accurate")]), "parts differ in"),
        (lambda: PackedKV.joined([packed.narrow(0, 128), packed.heads(0, 1)]), "parts differ in B, Hkv"),
        (lambda: pack_kv(k, v, keys=-1), "keys must be an integer from 0 up"),
        (lambda: pack_kv(k, v, key_block=True), "key_block must be an integer from 1 up"),
        (lambda: pack_kv(k, v, key_block=128, kernel=packed.kernel), "key_block=128 excludes kernel"),
        (lambda: pack_kv(k, v, key_block=100), "no kernel"),
    ]  # fmt: skip
    for scaling in ("head", "tensor", "token"):
        other = pack_kv(k, v, scaling=scaling)
        cases.append((lambda x=other: PackedKV.joined([x.narrow(0, 128), x.narrow(128, 372)]), "shares descales"))
    smooth = pack_kv(k, v, smooth_k=True)
    cases.append(
        (lambda: PackedKV.joined([smooth.narrow(0, 128), smooth.narrow(128, 372)]), "smooth_k subtracts a mean")
    )
    for call, text in cases:
        with pytest.raises(UnsupportedError, match=text):
            call()
