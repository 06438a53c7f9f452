"""Runs every compiled forward kernel, and those that make operands, on small problems under compute-sanitizer. Needs a
card and a built extension.

    python scripts/sanitize.py                # memcheck, racecheck and synccheck, each over all kernels
    python scripts/sanitize.py --run          # the problems alone, without a sanitizer
    python scripts/sanitize.py --profile ci  # only the kernels of a profile, where a larger one is built

racecheck is the one that found something: a descale overwritten by the next tile's copy while the softmax still read
it, which no result ever showed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts.build_extension import PROFILES  # noqa: E402  (needs the path above when run as a file)

TOOLS = ("memcheck", "racecheck", "synccheck")
KERNELS = "kns=attention,kns=pack"  # parts of their names
CLUSTERS = {"solo": 1, "split2": 2, "split4": 4}


def problems(tile_m: int, tile_n: int, stages: int, cluster: str) -> tuple[tuple[int, int, int, int], ...]:
    """Heads, KV heads, queries, keys: every slot of the pipeline used more than twice by every CTA, with a tail; more
    items than CTAs, of more than one tile; one full tile."""
    share = (2 * stages + 1) * tile_n * CLUSTERS[cluster]
    return (2, 1, tile_m + 6, share + 37), (600, 300, 70, tile_n + 6), (1, 1, tile_m, tile_n)


def run_problems(profile: str) -> int:
    """Launches those of the kernels of a profile one after the other; returns how many."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]
    import torch

    gpu, reference = importlib.import_module("gpu"), importlib.import_module("reference")
    launched = 0
    profiles = PROFILES[: PROFILES.index(profile) + 1]
    for variant in gpu.built_variants("fwd"):
        if variant.profile not in profiles:
            continue
        for problem in problems(variant.tile_m, variant.tile_n, variant.stages, variant.cluster):
            heads, kv_heads, seqlen_q, seqlen_k = problem
            q = reference.randn(1, heads, seqlen_q, variant.head_dim, seed=1, device="cuda")
            k = reference.randn(1, kv_heads, seqlen_k, variant.head_dim, seed=2, device="cuda")
            v = reference.randn(1, kv_heads, seqlen_k, variant.head_dim, seed=3, device="cuda")
            out_descale = torch.full((1,), 0.02, device="cuda") if variant.out == "e4m3" else None
            offset = seqlen_k - seqlen_q if variant.causal else 0
            for scaling in variant.scalings:
                operands = reference.operands_of(variant, q, k, v, scaling)
                gpu.run_kernel(
                    operands, variant, scale=0.125, scaling=scaling, causal_offset=offset, out_descale=out_descale
                )
                torch.cuda.synchronize()
                launched += 1
    return launched + run_packs(profiles)


def run_packs(profiles: Sequence[str]) -> int:
    """Those that quantise and pack, with tails of rows, of packed keys and of head_dim; returns how many."""
    import torch

    gpu, reference = importlib.import_module("gpu"), importlib.import_module("reference")
    fused = importlib.import_module("fp8cutlass.fused")
    launched = 0
    for pack in (pack for pack in gpu.built_packs() if pack["profile"] in profiles):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[pack["source"]]
        head_dim, block = pack["head_dim"], pack["key_block"]
        for width, keys in ((head_dim, 2 * block + 130), (head_dim - 8, 3)):
            q = reference.randn(2, 4, keys + 7, width, seed=1, device="cuda").to(dtype)
            k = reference.randn(2, 2, keys, width, seed=2, device="cuda").to(dtype)
            modes = gpu.built_manifest().scaling.values()
            for granularity, both in itertools.product(modes, (False, True)):
                options = {"head_dim": head_dim, "key_block": block, "amax": 14.0, "negate_q": True}
                options |= {"smooth_k": both, "hadamard": both}
                fused.quantise_and_pack(q, k, k, granularity=granularity, **options)
                torch.cuda.synchronize()
                launched += 1
    return launched


def main() -> int:
    """The command line; returns 0 when every tool is clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the problems without a sanitizer")
    parser.add_argument("--profile", choices=PROFILES, default=PROFILES[-1], help="default: everything that is built")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable (default: all)")
    options = parser.parse_args()
    if options.run:
        print(f"{run_problems(options.profile)} launches")
        return 0
    # Each allocation of its own, so that memcheck sees the ends of tensors.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool in options.tool or TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--kernel-name", KERNELS, "--error-exitcode", "9"]
        print(f"{tool}:", flush=True)
        problems_only = [sys.executable, __file__, "--run", "--profile", options.profile]
        if subprocess.run([*command, *problems_only], env=environment).returncode != 0:
            failed.append(tool)
    print(f"failed: {', '.join(failed)}" if failed else "all clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
