"""The operators of the extension: the schemas that the package calls, and those that the source states."""

from __future__ import annotations

import re

import torch
from compilers import ROOT

COMMON = (
    "int variant, Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "Tensor? out_descale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? amax, float scale, int causal_offset"
)
PACK = (
    "int key_block, Tensor? q, Tensor? k, Tensor? v, int q_granularity, int k_granularity, int v_granularity, "
    "float score_amax, float v_amax, bool negate_q, Tensor(a!)? q8, Tensor(b!)? k8, Tensor(c!)? v8, "
    "Tensor(d!)? q_descale, Tensor(e!)? k_descale, Tensor(f!)? v_descale, Tensor(g!)? amax, bool hadamard, "
    "Tensor(h!)? k_mean"
)
ATTEND = (
    "Tensor constants, Tensor q, Tensor k, Tensor v, Tensor? out_descale=None, Tensor(a!)? lse=None, "
    "Tensor(b!)? amax=None, Tensor? sinks=None, Tensor(c!)? k_mean=None"
)
ATTEND_FP8 = (
    "Tensor constants, Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "Tensor? out_descale=None, Tensor(a!)? lse=None, Tensor(b!)? amax=None, Tensor? sinks=None"
)
ATTEND_PACKED = (
    "Tensor constants, Tensor q, Tensor k, Tensor v, Tensor k_descale, Tensor v_descale, Tensor? out_descale=None, "
    "Tensor(a!)? lse=None, Tensor(b!)? amax=None, Tensor? sinks=None"
)
SCORES = "int window_offset=0, bool merge_lse=False, float softcap=0.0, Tensor? sinks=None"
DIAGNOSTIC = "Tensor(d!) scores, Tensor(e!) p, Tensor(f!) weight, Tensor(g!) tile_o"
ATTEND_RAGGED = (
    "int variant, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor(a!)? lse, float score_amax, float v_amax, float scale, int window_left, "
    "int window_right, bool bottom_right, bool leave_q, Tensor(b!)? workspace=None, "
    "float softcap=0.0, Tensor? sinks=None, int resident=-1"
)
RAGGED = (
    "int variant, Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor(a!) plan, "
    "Tensor(b!) out, Tensor(c!)? lse, float scale, int window_left, int window_right, bool bottom_right, "
    "bool keys_in_blocks, float softcap=0.0, Tensor? sinks=None"
)
ATTEND_RAGGED_FP8 = (
    "int variant, Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor(a!)? lse, "
    "float score_amax, float scale, int window_left, int window_right, bool bottom_right, float softcap=0.0, "
    "Tensor? sinks=None"
)
CUT = (
    "Tensor numbers, Tensor lengths, Tensor? cu_seqlens_q, int total_q, int most_keys, int heads, int kv_heads, "
    "Tensor(a!) work"
)
APPEND = (
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_token_descale, "
    "Tensor(d!)? v_page_descale, Tensor? k_descale, Tensor? v_descale, Tensor? slots, Tensor? positions, "
    "Tensor? cu_seqlens, Tensor? lengths, Tensor? page_table, Tensor(e!)? used, Tensor? rotary_cos, "
    "Tensor? rotary_sin, bool interleaved, Tensor? k_mean, bool hadamard"
)
DECODE = (
    "Tensor numbers, Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor lengths, "
    "Tensor? cu_seqlens_q=None, Tensor? k_descale=None, Tensor? v_descale=None, Tensor? k_token_descale=None, "
    "Tensor? v_page_descale=None, Tensor? sinks=None, Tensor(a!)? work=None, Tensor(b!)? out=None, "
    "Tensor(c!)? lse=None"
)
PREFILL = (
    "Tensor numbers, int variant, Tensor q, Tensor k, Tensor v, Tensor? page_table, Tensor lengths, "
    "Tensor? cu_seqlens_q, Tensor? k_descale, Tensor? v_descale, Tensor? k_token_descale, "
    "Tensor? v_page_descale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) rest, float score_amax, int least, "
    "int most, int capacity"
)

MASK = "Tensor? tiles=None, Tensor? counts=None, Tensor? bits=None, Tensor? bias=None"
SCHEMAS = {
    "forward": f"({COMMON}, {SCORES}, {MASK}) -> ()",
    "diagnose": f"({COMMON}, {DIAGNOSTIC}) -> ()",
    "pack": f"({PACK}) -> ()",
    "attend": f"({ATTEND}, {MASK}) -> Tensor",
    "attend_fp8": f"({ATTEND_FP8}, {MASK}) -> Tensor",
    "attend_packed": f"({ATTEND_PACKED}, {MASK}, Tensor(c!)? out=None) -> Tensor",
    "forward_ragged": f"({RAGGED}) -> ()",
    "ragged_plan_words": "(int variant, int tokens, int sequences) -> int",
    "attend_ragged": f"({ATTEND_RAGGED}) -> Tensor",
    "attend_ragged_fp8": f"({ATTEND_RAGGED_FP8}) -> Tensor",
    "append": f"({APPEND}) -> ()",
    "cut": f"({CUT}) -> ()",
    "decode": f"({DECODE}) -> Tensor",
    "prefill": f"({PREFILL}) -> ()",
    "load": "(int variant, int device, int source=-1) -> ()",
    "pack_mask": "(Tensor seen, int keys, Tensor(a!) tiles, Tensor(b!) counts, Tensor(c!) bits) -> ()",
    "merge": "(Tensor(a!) out, Tensor(b!) lse, Tensor to, Tensor to_lse) -> ()",
    "load_decode": "(int decode, int device) -> ()",
    "load_resident": "(int resident, int device) -> ()",
}
SCHEMAS = {name: f"fp8cutlass_C::{name}{text}" for name, text in SCHEMAS.items()}


def schema(text: str) -> torch.FunctionSchema:
    return torch._C.parse_schema(text)


def stated() -> dict[str, torch.FunctionSchema]:
    """What csrc/binding.cpp defines, by name: its strings put together, its macros in their places."""
    source = (ROOT / "csrc" / "binding.cpp").read_text()
    define = r"#define (FP8CUTLASS_\w+_ARGUMENTS)((?:[^\n]*\\\n)*[^\n]*)\n"
    macros = {name: _joined(text) for name, text in re.findall(define, source)}
    found = {}
    for text in re.findall(r"m\.def\((.*?)\);", source, re.S):
        for name, value in macros.items():
            text = text.replace(name, f'"{value}"')
        one = schema("fp8cutlass_C::" + _joined(text))
        found[one.name.removeprefix("fp8cutlass_C::")] = one
    return found


def _joined(text: str) -> str:
    return "".join(re.findall(r'"([^"]*)"', text))
