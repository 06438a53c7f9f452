"""The problems that kernels run under compute-sanitizer: small, with every tail, every slot of a pipeline used twice.

Modules of the tests and of the package are imported when a kernel runs, as their folders enter the path then.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.sanitize_decode import run_decode
from scripts.sanitize_masks import run_blocks

CLUSTERS = {"solo": 1, "split2": 2, "split4": 4}


def launches(kernel: Any) -> Iterator[None]:
    """Launches a variant, a kernel of decode, one that keeps K and V, or one that packs (a row of the manifest), once a
    turn."""
    return RUNS[kind_of(kernel)](kernel)


def kind_of(kernel: Any) -> str:
    """A key of RUNS."""
    if isinstance(kernel, dict):
        return "pack"
    return str(getattr(kernel, "kind", type(kernel).__name__.lower()))  # of a variant, or "decode" or "resident"


def problems(
    tile_m: int, tile_n: int, stages: int, cluster: str, unrolled: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int, int, int], ...]:
    """Heads, KV heads, queries, keys: every slot of the pipeline used more than twice by every CTA, with a tail; more
    items than CTAs, of more than one tile; one full tile; and more items than CTAs for each form of ``unrolled``."""
    share = (2 * stages + 1) * tile_n * CLUSTERS[cluster]
    forms = [(300, 150, 70, most - 5) for _, most in unrolled]
    return (2, 1, tile_m + 6, share + 37), (600, 300, 70, tile_n + 6), (1, 1, tile_m, tile_n), *forms


def run_variant(variant: Any) -> Iterator[None]:
    """Launches a forward kernel, once a turn. Operands are made on the CPU, so that initcheck sees them arrive."""
    import torch

    gpu, reference = importlib.import_module("gpu"), importlib.import_module("reference")
    for heads, kv_heads, seqlen_q, seqlen_k in problems(
        variant.tile_m, variant.tile_n, variant.stages, variant.cluster, variant.unrolled
    ):
        q = reference.randn(1, heads, seqlen_q, variant.head_dim, seed=1)
        k, v = (reference.randn(1, kv_heads, seqlen_k, variant.head_dim, seed=s) for s in (2, 3))
        offset = seqlen_k - seqlen_q if variant.causal else 0
        out_descale = torch.full((1,), 0.02) if variant.out == "e4m3" else None
        for scaling in variant.scalings:
            plan, tensors = gpu.call_of(
                reference.operands_of(variant, q, k, v, scaling),
                variant,
                scale=0.125,
                scaling=scaling,
                causal_offset=offset,
                out_descale=out_descale,
            )
            gpu.run_from_host(plan, tensors)
            yield
        if variant.plain:
            call = dataclasses.replace(plan.call, return_lse=False, return_amax=False)
            gpu.run_from_host(dataclasses.replace(plan, call=call), tensors)
            yield
        if variant.quantises_q:
            shapes = (heads, seqlen_q), (kv_heads, seqlen_k), (kv_heads, seqlen_k)
            halves = [reference.randn(1, *x, variant.head_dim, seed=s, device="cuda") for s, x in enumerate(shapes)]
            on_card = {"causal_offset": offset, "out_descale": gpu.out_descale_for(variant)}
            for hand_over in (False, True):
                gpu.attend_source(variant, *halves, **on_card, hand_over=hand_over)
                yield


def softcap_of(variant: Any) -> float:
    return 2.0 if variant.kind == "capped" else 0.0


def run_window(variant: Any) -> Iterator[None]:
    """Launches a kernel of windows, or one that caps scores, once a turn: bands that begin and end inside tiles, or
    hide whole rows, with the LSE and without."""
    import torch

    gpu, calls = importlib.import_module("gpu"), importlib.import_module("calls")
    launch = importlib.import_module("fp8cutlass.call.launch")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.out]
    for heads, kv_heads, rows, keys in problems(variant.tile_m, variant.tile_n, variant.stages, variant.cluster, ()):
        q, k, v = (
            torch.randn(1, h, tokens, variant.head_dim).to(dtype).cuda()
            for h, tokens in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
        )
        asked = {"scaling": "block", "out_dtype": dtype, "bottom_right": True, "return_amax": False}
        asked["softcap"] = softcap_of(variant)
        bands = {"full": ((None, None),), "causal": ((None, 0),), "window": ((variant.tile_n + 5, 0), (3, 40))}
        for (left, right), lse in itertools.product(bands[variant.mask], (True, False)):
            call, tensors = calls.split("half", q=q, k=k, v=v, left=left, right=right, return_lse=lse, **asked)
            plan = calls.plan_of(call, variant, gpu.built_manifest())
            operands = launch.kernel_operands(call, variant, plan.granularity, tensors)
            launch.run_operands(plan, tensors, operands)
            yield


def run_biased(variant: Any) -> Iterator[None]:
    """Launches a kernel that adds a bias, once a turn: of each type, aligned to 16 bytes and not, with tails; one for
    each row and one for all."""
    import torch

    fp8cutlass = importlib.import_module("fp8cutlass")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.out]
    precision = {"exp2": "accurate", "exp2x2": "high"}[variant.softmax]
    for heads, kv_heads, rows, keys in problems(variant.tile_m, variant.tile_n, variant.stages, variant.cluster, ()):
        q, k, v = (
            torch.randn(1, h, tokens, variant.head_dim).to(dtype).cuda()
            for h, tokens in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
        )
        for of, length in itertools.product(
            (torch.float32, torch.bfloat16, torch.float16), (keys + 1, -(-keys // 8) * 8)
        ):
            bias = torch.randn(1, heads, rows, length, device="cuda").to(of)[..., :keys]
            for given in (bias, bias[:, :, :1]):
                fp8cutlass.attention(
                    q, k, v, given, is_causal=True, causal_alignment="bottom_right", precision=precision,
                    enable_gqa=True, kernel=variant.id, return_lse=True,
                )  # fmt: skip
                yield


def run_ragged(variant: Any) -> Iterator[None]:
    """Launches a kernel of ragged batches with its plan, once a turn: sequences without rows or keys, of one token, of
    whole tiles; more items than CTAs; with the LSE and without."""
    import torch

    gpu, ragged = importlib.import_module("gpu"), importlib.import_module("fp8cutlass.call.ragged")
    m, n, cap = variant.tile_m, variant.tile_n, softcap_of(variant)
    window = {"full": (-1, -1), "causal": (-1, 0), "window": (n + 5, 3)}[variant.mask]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.out]
    for rows, keys, lies in (
        ([m + 6, 0, 1, m], [(2 * variant.stages + 1) * n + 37, 5, 0, n], None),
        ([70, m + 1] * 30, [n, 9] * 30, None),
        ([m, 9, 70], [n, 9, 2 * n], [-5, m + 99, 3, 2**31 - 1]),
    ):
        q, k, v = (
            torch.randn(sum(tokens), heads, variant.head_dim).to(dtype).cuda()
            for tokens, heads in ((rows, 4), (keys, 2), (keys, 2))
        )
        ends = [torch.tensor(lies or [0, *itertools.accumulate(x)], dtype=torch.int32).cuda() for x in (rows, keys)]
        used = [torch.tensor(x, dtype=torch.int32).cuda() for x in (rows, keys)] if lies else [None, None]
        sizes = max(rows), max(keys)
        call = ragged.RaggedCall(
            q, k, v, *ends, *used, *sizes, (), 0.125, *window, True, dtype, "fast", True, variant.id, cap
        )
        for lse in (torch.empty(q.shape[1::-1], device=q.device), None):
            ragged.launch(call, variant, gpu.built_manifest().index[variant.id], lse)
            yield


def run_capped(variant: Any) -> Iterator[None]:
    """Launches a kernel that caps scores, once a turn."""
    return (run_ragged if variant.walk == "ragged" else run_window)(variant)


def run_copies(pack: dict[str, Any]) -> Iterator[None]:
    """Launches a kernel that copies FP8 operands, and one that reads them, once a turn: with tails of rows, of packed
    keys and of head_dim, descales of each form, and a sign to turn."""
    import torch

    gpu, reference = importlib.import_module("gpu"), importlib.import_module("reference")
    card = importlib.import_module("fp8cutlass.call.card")
    head_dim = pack["head_dim"]
    first = {v.scaling: v for v in reversed(gpu.built_variants("fwd", head_dim=head_dim))}
    for variant, (width, keys) in itertools.product(first.values(), ((head_dim, 258), (head_dim - 16, 3))):
        q = reference.randn(2, 4, keys + 7, width, seed=1, device="cuda")
        k, v = (reference.randn(2, 2, keys, width, seed=seed, device="cuda") for seed in (2, 3))
        options = {"scale": -0.125, "out_descale": gpu.out_descale_for(variant)}
        for scaling in variant.scalings:
            plan, t = gpu.call_of(reference.operands_of(variant, q, k, v, scaling), variant, scaling=scaling, **options)
            one = torch.full((), 0.5, device="cuda")
            for descales in ({}, dict.fromkeys(("q_descale", "k_descale", "v_descale"), one)):
                card.run_on_card(plan, t._replace(**descales))
                yield


def run_ragged_copies(pack: dict[str, Any]) -> Iterator[None]:
    """The same for ragged batches, which the kernel of the head_dim attends: sequences with tails, without keys, and
    lengths that lie."""
    import torch

    gpu, ragged = importlib.import_module("gpu"), importlib.import_module("fp8cutlass.call.ragged")
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    softmaxes = ("exp2", "linear")  # for the second Q is lowered
    found = [v for of in softmaxes for v in gpu.built_variants("ragged", head_dim=pack["head_dim"], softmax=of)[:1]]
    for variant, (width, lies) in itertools.product(found, ((0, None), (16, None), (0, [-5, 99, 3, 2**31 - 1]))):
        q, k, v = (
            torch.randn(n, heads, variant.head_dim - width).to(torch.float8_e4m3fn).cuda()
            for n, heads in ((211, 4), (395, 2), (395, 2))
        )
        ends = [torch.tensor(lies or x, dtype=torch.int32).cuda() for x in ([3, 133, 133, 209], [0, 130, 390, 393])]
        window = {"full": (-1, -1), "causal": (-1, 0), "window": (70, 3)}[variant.mask]
        descales = (torch.ones(1).cuda(),) * 3
        call = ragged.RaggedCall(
            q, k, v, *ends, None, None, 130, 260, descales, -0.125, *window, True, dtypes[variant.out], "fast", True, ""
        )
        lse = torch.empty(q.shape[1::-1], device=q.device)
        ragged.launch(call, variant, gpu.built_manifest().index[variant.id], lse)
        yield


def run_pages(pack: dict[str, Any]) -> Iterator[None]:
    """The same for long chunks over pages, beside steps of decode: tails, descales of tokens, pages and heads, a NaN in
    V, keys that do not fit, and numbers that lie. What is chosen, copied and attended is launched by one operator."""
    import torch

    gpu, host = importlib.import_module("gpu"), importlib.import_module("decode_host")
    card, native = importlib.import_module("decode_card"), importlib.import_module("fp8cutlass.native.decode")
    head_dim, manifest = pack["head_dim"], gpu.built_manifest()
    decodes = [d for d in gpu.built_decodes() if d.head_dim == head_dim]
    variants = [v for v in gpu.built_variants("ragged", head_dim=head_dim, softmax="exp2") if v.key_block == 128]
    if not decodes or not variants:
        return
    variant, kernel = variants[0], decodes[0]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant.out]
    ends = {"full": (-1, -1), "causal": (-1, 0), "window": (150, 3)}[variant.mask]

    def of(**rest: Any) -> Any:
        return host.batch((300, 0, 40, 700, 131), [150, 2, 1, 260, 40], (4, 2), head_dim, 16, dtype=dtype, **rest)

    plain, random = of(), torch.Generator().manual_seed(9)
    inside = {"k_token": torch.rand(plain.k.shape[:3], generator=random) + 0.5}
    inside |= {"v_page": torch.rand(plain.k.shape[0], 2, generator=random) + 0.5}
    broken = of(seed=3)
    broken.v[int(broken.table[3, 9]), 7, 1, 3] = 0x7F
    wild = dataclasses.replace(plain, table=torch.full_like(plain.table, 2**31 - 1), lengths=plain.lengths * -(2**20))
    for batch, capacity in ((plain, 4096), (dataclasses.replace(plain, **inside), 4096), (broken, 4096), (plain, 512)):
        b = card.on_card(batch)
        caches = native.Caches(b.k, b.v, b.k_descale, b.v_descale, b.k_token, b.v_page)
        for case in (b, dataclasses.replace(b, table=wild.table.cuda(), lengths=wild.lengths.cuda())):
            work = native.Work(kernel, manifest.decodes.index(kernel), 8, True, routed=True)
            options = {"scale": b.scale, "left": ends[0], "right": ends[1]}
            out, lse, rest = native.prefill(
                work, manifest.index[variant.id], case.q, caches, case.table, case.lengths, case.cu_q, **options,
                return_lse=True, score_amax=448.0, least=130, most=3, capacity=capacity,
            )  # fmt: skip
            native.attend(work, case.q, caches, case.table, rest, case.cu_q, **options, into=(out, lse))
            yield


def run_pack(pack: dict[str, Any]) -> Iterator[None]:
    """Launches a kernel that quantises and packs, once a turn, with tails of rows, of packed keys and of head_dim."""
    import torch

    if pack["source"] == "fp8":
        yield from run_copies(pack)
        yield from run_ragged_copies(pack)
        yield from run_pages(pack)
        return
    gpu, reference = importlib.import_module("gpu"), importlib.import_module("reference")
    fused = importlib.import_module("fp8cutlass.native.fused")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[pack["source"]]
    head_dim, block = pack["head_dim"], pack["key_block"]
    for width, keys in ((head_dim, 2 * block + 130), (head_dim - 8, 3)):
        q = reference.randn(2, 4, keys + 7, width, seed=1).to(dtype).cuda()
        k = reference.randn(2, 2, keys, width, seed=2).to(dtype).cuda()
        for granularity, both in itertools.product(gpu.built_manifest().scaling.values(), (False, True)):
            options = {"head_dim": head_dim, "key_block": block, "amax": 14.0, "negate_q": True}
            options |= {"smooth_k": both, "hadamard": both, "granularity": granularity}
            fused.quantise_and_pack(q, k, k, **options)
            yield


def run_resident(kernel: Any) -> Iterator[None]:
    """Launches a kernel that keeps K and V, once a turn: with and without a causal mask, more heads than CTAs, tails of
    rows, keys and columns, a head whose rows several CTAs take. And ragged batches: few and many sequences, some of
    them without rows or keys, tokens that belong to none."""
    import torch

    module = importlib.import_module("residents")
    built = importlib.import_module("gpu").built_manifest()
    reference = importlib.import_module("fp8cutlass.choose.resident").reference
    for causal in (False, True):
        variant = reference(built, kernel.head_dim, kernel.source, causal=causal)
        for batch, heads, kv_heads, rows, keys, width in (
            (60, 12, 4, 66, kernel.keys, 0),
            (2, 3, 3, 130, kernel.keys // 2 + 5, kernel.head_dim - 24),
            (1, 6, 2, 1000, kernel.keys - 3, 0),
            (1, 1, 1, 1, 1, 0),
        ):
            operands = module.made(kernel, batch, heads, kv_heads, rows, keys, width)
            module.kept(kernel, variant, operands, causal_offset=keys - rows)
            yield
        for lengths, heads, kv_heads in (
            ([(70, kernel.keys), (1, 5), (0, 3), (200, 0), (33, kernel.keys // 2 + 5)], 4, 2),
            ([(i % 80, 1 + 37 * i % kernel.keys) for i in range(90)], 6, 6),
        ):
            rows, keys = (sum(n) for n in zip(*lengths, strict=True))
            operands = [x[0].transpose(0, 1) for x in module.made(kernel, 1, heads, kv_heads, rows + 9, keys)]
            tables = [torch.tensor([0, *itertools.accumulate(n)]).int().cuda() for n in zip(*lengths, strict=True)]
            module.kept_of_lengths(kernel, variant, operands, *tables)
            yield


RUNS = {
    "fwd": run_variant,
    "window": run_window,
    "blocks": run_blocks,
    "ragged": run_ragged,
    "capped": run_capped,
    "biased": run_biased,
    "pack": run_pack,
    "decode": run_decode,
    "resident": run_resident,
}
