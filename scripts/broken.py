"""Kernels broken on purpose, and what notices: copies with a barrier taken out, a descale ignored, a rule switched off.

    python scripts/broken.py                # needs a card, nvcc and compute-sanitizer; minutes
    python scripts/broken.py --no-card      # only what compiling shows

The exit status is 0 when every fault was noticed by what is named beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from codegen.families import FAMILIES  # noqa: E402  (needs the path above when run as a file)
from codegen.gates.compile import measure_all  # noqa: E402
from codegen.gates.rules import check  # noqa: E402
from codegen.gates.subject import render  # noqa: E402
from codegen.gates.toolbox import open_toolbox  # noqa: E402
from codegen.legal import check as check_rules  # noqa: E402
from codegen.variant import Variant, parse_id  # noqa: E402


@dataclass(frozen=True)
class Finding:
    """``caught``: whether ``by`` noticed the fault; ``said`` is its first words on it."""

    fault: str
    kernel: str
    by: str
    caught: bool
    said: str
    seconds: float


@dataclass(frozen=True)
class Fault:
    """``old`` in the source of ``kernel``, or in a ``header`` that it includes, becomes ``new``; ``by`` is what has to
    notice: tests or racecheck. ``hangs``: the kernel may wait for ever, so that tests without an end have noticed it;
    elsewhere they say nothing. ``beside``: a kernel that tests compare with."""

    name: str
    kernel: str
    old: str
    new: str
    by: str
    hangs: bool = False
    header: str = ""
    beside: str = ""


FINISH = "fp8cutlass/decode/finish.cuh"
CONVERT = "fp8cutlass/decode/convert.cuh"
INTEGERS = "fp8cutlass/softmax_integer.cuh"
RESIDENT = "fp8cutlass/sm90/resident.cuh"
QUERY = "fp8cutlass/sm90/query.cuh"
REFERENCE = "sm90a_fwd_d64_m64n128w4_s3_block_full_e4m3_bf16_linear_serial_solo"  # of a kernel that keeps K and V
TESTS_END = 150.0  # seconds in which the tests of a kernel that does not hang end on a busy host, too
FAULTS = (
    Fault(
        "a descale: the one of V's blocks ignored",
        "sm90a_fwd_d96_m64n128w4_s3_block_causal_e4m3_bf16_exp2_serial_solo",
        "return control.descales[stage.ring()].y;",
        "return 1.f;",
        "tests",
    ),
    Fault(
        "a barrier: the wait for a tile of V taken out",
        "sm90a_fwd_d64_m64n128w4_s3_block_causal_e4m3_bf16_exp2_serial_solo",
        "      sm90::wait(control.v_full[stage.slot], stage.parity);\n",
        "",
        "tests",
        hangs=True,
    ),
    Fault(
        "a barrier: the one between a tile's arrival and its use taken out",
        "sm89_fwd_d32_m64n128w4_s4_block_causal_e4m3_bf16_linear",
        "      __syncthreads();                     // for all threads; and everybody is done with the slot that is "
        "loaded next\n",
        "",
        "racecheck",
    ),
    Fault(
        "the walk: a window begins one key late",
        "sm90a_fwd_d64_m128n256w8_s3_block_window_e4m3_bf16_linear_pingpong_solo",
        "mask_before(s, edge_of(item, tile, Walk::band(p, item).first));",
        "mask_before(s, edge_of(item, tile, Walk::band(p, item).first + 1));",
        "tests",
    ),
    Fault(
        "the walk: a softmax of the first keys of a tile leaves out 64 of them",
        "sm90a_fwd_d128_m128n192w8_s3_block_window_e4m3_fp16_linear_pingpong_solo_ragged",
        "< 64 * groups\n",
        "< 64 * groups + 64\n",
        "tests",
    ),
    Fault(
        "the walk: a softmax of the last keys of a tile leaves out 64 of them",
        "sm90a_fwd_d128_m128n192w8_s3_block_window_e4m3_bf16_linear_pingpong_solo",
        ">= kTileN - 64 * groups",
        ">= kTileN - 64 * groups - 64",
        "tests",
    ),
    Fault(
        "the walk: a sequence of a ragged batch ends one key late",
        "sm90a_fwd_d64_m128n256w8_s3_block_full_e4m3_bf16_linear_pingpong_solo_ragged",
        "last[r] = Walk::keys(p, item) - 1 - key;",
        "last[r] = Walk::keys(p, item) - key;",
        "tests",
    ),
    Fault(
        "a mask: the entries of a list behind the first 32 are those again",
        "sm90a_fwd_d64_m128n128w8_s4_block_blocks_e4m3_bf16_exp2_pingpong_solo",
        "if (j % 32 == 31) entries = later, descales =",
        "if (j % 32 == 31) descales =",
        "tests",
    ),
    Fault(
        "a mask: what rows see is that of another tile",
        "sm90a_fwd_d64_m128n128w8_s4_block_blocks_e4m3_bf16_linear_pingpong_solo",
        "control.visits[stage.slot]",
        "control.visits[stage.next().slot]",
        "tests",
    ),
    Fault(
        "a cap: the one of scores left out",
        "sm90a_fwd_d64_m128n128w8_s4_block_causal_e4m3_bf16_exp2_pingpong_solo_capped",
        "    cap_scores(s, slope);\n",
        "",
        "tests",
    ),
    Fault(
        "a bias: that of another key",
        "sm90a_fwd_d64_m128n128w8_s2_block_window_e4m3_bf16_exp2_serial_solo_biased",
        "first, Walk::rows(p, item), tile * kTileN, Walk::keys(p, item));",
        "first, Walk::rows(p, item), tile * kTileN + 8, Walk::keys(p, item));",
        "tests",
    ),
    Fault(
        "a bias: copied to while it is read",
        "sm90a_fwd_d96_m128n128w8_s2_block_window_e4m3_bf16_exp2_serial_solo_biased",
        "        bias_rows().read(params.bias, bias);\n        if (j + 1 < tiles) copy_bias(kHalves, item, tile + 1);",
        "        if (j + 1 < tiles) copy_bias(kHalves, item, tile + 1);\n        bias_rows().read(params.bias, bias);",
        "tests",
    ),
    Fault(
        "a bias: one in float32 copied to before it is read",
        "sm90a_fwd_d128_m128n128w8_s3_block_window_e4m3_bf16_exp2_serial_solo_biased",
        "      softmax(s, turn, tile, stage, k_scale, masked, bias);\n",
        "      if (is_copied(kFloats) && j + 1 < tiles) copy_bias(kFloats, item, tile + 1);\n"
        "      softmax(s, turn, tile, stage, k_scale, masked, bias);\n",
        "tests",
    ),
    Fault(
        "a bias: that of another head",
        "sm90a_fwd_d64_m128n128w8_s2_block_window_e4m3_fp16_exp2_serial_solo_biased",
        "(item.head + second) * params.bias.stride_head",
        "item.kv_head * params.bias.stride_head",
        "tests",
    ),
    Fault(
        "sinks: they join the sum twice",
        "sm90a_fwd_d64_m64n128w4_s2_block_causal_e4m3_bf16_linear_serial_split2",
        "      if (p.sinks != nullptr) add_sink(",
        "      if (p.sinks != nullptr) for (int twice = 0; twice < 2; ++twice) add_sink(",
        "tests",
    ),
    Fault(
        "integers: K's descale is that of another lane",
        "sm90a_fwd_d64_m128n128w8_s3_block_causal_s8_bf16_codes_pingpong_solo",
        "control.k_descale[stage.slot][unsigned(thread_index()) % 4]",
        "control.k_descale[stage.slot][unsigned(thread_index()) % 4 ^ 1]",
        "tests",
    ),
    Fault(
        "integers: a sum runs over what its bits hold",
        "sm90a_fwd_d64_m128n128w8_s3_block_causal_s8_fp16_codes_pingpong_solo",
        "control.raised[threadIdx.x] = kRaise;",
        "control.raised[threadIdx.x] = kRaise + 0x3FC000u;",
        "tests",
    ),
    Fault(
        "integers: codes an octave too high run over the sign",
        "sm90a_fwd_d64_m128n128w8_s3_block_full_s8_bf16_codes_pingpong_solo",
        "kTop<Code::linear> + (logit - top)",
        "kTop<Code::linear> + 8.f + (logit - top)",
        "tests",
        header=INTEGERS,
    ),
    Fault(
        "integers: a sum does not begin at what it is read by",
        "sm89_fwd_d64_m64n128w4_s2_block_full_s8_bf16_codes",
        "constexpr Score kNoScore{kRaise};",
        "constexpr Score kNoScore{};",
        "tests",
    ),
    Fault(
        "integers: Q has no sign",
        "sm89_fwd_d64_m64n128w4_s2_block_full_s8u8_bf16_bytes",
        "using MmaScores = sm89::SM80_16x8x32_S32S8S8S32_TN;",
        "using MmaScores = sm89::SM80_16x8x32_S32U8S8S32_TN;",
        "tests",
    ),
    Fault(
        "integers: P in u8 is read as s8",
        "sm89_fwd_d64_m64n128w4_s2_block_causal_s8u8_bf16_bytes",
        "using MmaValues = sm89::SM80_16x8x32_S32U8S8S32_TN;",
        "using MmaValues = sm89::SM80_16x8x32_S32S8S8S32_TN;",
        "tests",
    ),
    Fault(
        "integers: V's descales are those of another tile",
        "sm89_fwd_d64_m64n128w4_s2_block_causal_s8u8_fp16_bytes",
        "slope, shared.v_descale[tile % 2], masked",
        "slope, shared.v_descale[(tile + 1) % 2], masked",
        "tests",
    ),
    Fault(
        "decode: a slice goes into a slot that is in use",
        "decode_sm90a_d64_r8",
        "const int before = slot == 0 ? kStages - 1 : slot - 1",
        "const int before = slot == kStages - 1 ? 0 : slot + 1",
        "tests",
    ),
    Fault(
        "decode: Q is read before all warps have stored it",
        "decode_sm90a_d96_r16",
        "queries[buffer]);\n    __syncthreads();\n    state",
        "queries[buffer]);\n    state",
        "racecheck",
    ),
    Fault(
        "decode: one arrival of the CTAs that share a unit is lost",
        "decode_sm90a_d64_r16",
        "== unsigned(count - 1)",
        "== unsigned(count)",
        "tests",
        header=FINISH,
    ),
    Fault(
        "decode: the sum of a part is that of another row",
        "decode_sm90a_d96_r8",
        "from + kRows * kHeadDim + 2 * row(k)",
        "from + kRows * kHeadDim + 2 * (row(k) ^ 1)",
        "tests",
        header=FINISH,
    ),
    Fault(
        "decode: parts are added from the last to arrive on",
        "decode_sm90a_d128_r8",
        "i == 0 ? begin : rest + 2 * i * kPart",
        "p.parts + slot_of(first + (c + i + int(blockIdx.x) - 2 * first) % (last - first + 1), first) * kPart",
        "tests",
        header=FINISH,
    ),
    Fault(
        "decode: a tile is said to be there before its V is",
        "decode_sm90a_d128_r64",
        "  held.to_panels(tile.v[0], place, held.v);\n  fence_products();\n  arrive(handoff.there[number % 2]);\n",
        "  arrive(handoff.there[number % 2]);\n  delay_point(27);\n  held.to_panels(tile.v[0], place, held.v);\n",
        "tests",
        header=CONVERT,
    ),
    Fault(
        "lowered: each half of a row is divided by its own power of two",
        "sm90a_fwd_d128_m128n192w8_s3_block_causal_e4m3_bf16_linear_pingpong_solo_ragged",
        "  sum += __shfl_xor_sync(~0u, sum, kRowsAtOnce);\n",
        "",
        "tests",
        header=QUERY,
    ),
    Fault(
        "resident, ragged: keys of the sequence behind count for a block's maximum",
        "resident_d64_k128_bf16",
        "    if (cut) clear_keys<R>(k, at.keys());\n",
        "",
        "tests",
        header=RESIDENT,
        beside=REFERENCE,
    ),
    Fault(
        "resident, ragged: V of the sequence behind is multiplied",
        "resident_d64_k64_fp16",
        "      if (cut) clear_values<R>(v, at.keys());\n    }\n    tell_largest",
        "    }\n    tell_largest",
        "tests",
        header=RESIDENT,
        beside=REFERENCE.replace("bf16", "fp16"),
    ),
    Fault(  # the last, as a kernel that hangs may keep the card busy
        "resident: a tile is multiplied before it is there",
        "resident_d64_k64_bf16",
        "    wait(shared.there[slot], R::round_of(number) & 1);\n    const bool masked",
        "    const bool masked",
        "tests",
        hangs=True,
        header=RESIDENT,
        beside=REFERENCE,
    ),
)
# Rules of the sm90a family, a declared point that each of them alone refuses, and the gate that has to notice.
SWITCHED_OFF = (
    ("SPILLS", "sm90a_fwd_d192_m128n192w8_s2_block_full_e4m3_bf16_linear_columns_solo", "SPILL"),
    ("SMEM", "sm90a_fwd_d96_m64n256w4_s4_block_full_e4m3_bf16_linear_overlap_solo", "COMPILE"),
)


def broken_sources(generated: Path, faults: tuple[Fault, ...] = FAULTS) -> None:
    """Plant every fault into the generated folder. LookupError where a source does not have what is to be replaced."""
    for fault in faults:
        path = generated / fault.kernel.split("_")[0] / f"{fault.kernel}.cu"
        text = inlined(path.read_text(encoding="utf-8"), fault.header)
        if text.count(fault.old) != 1:
            raise LookupError(f"{path} has {text.count(fault.old)} times what is to be broken: {fault.old!r}")
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def inlined(text: str, header: str) -> str:
    """A source with the text of a header in place of its line, so that a fault is in this kernel alone."""
    if not header:
        return text
    line = f'#include "{header}"\n'
    if text.count(line) != 1:
        raise LookupError(f"no kernel that includes {header}")
    body = (ROOT / "include" / header).read_text(encoding="utf-8")
    return text.replace(line, body.replace("#pragma once\n", ""))


def generate(folder: Path, faults: tuple[Fault, ...] = FAULTS) -> Path:
    """The kernels that are to be broken, as the generator writes them."""
    kernels = dict.fromkeys(x for fault in faults for x in (fault.kernel, fault.beside) if x)
    ids = [x for kernel in kernels for x in ("--only", kernel)]
    _run(["-m", "codegen", "--arch", "sm90a", "--emulated", *ids, "--out", str(folder)])
    return folder


def _run(arguments: list[str], environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, **output)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments[:3])} failed:\n{done.stdout[-3000:]}")


def on_the_card(folder: Path, faults: tuple[Fault, ...]) -> Iterator[Finding]:
    """Build the broken copies, with delays, and let the tests and racecheck have them."""
    generated = generate(folder / "generated", faults)
    broken_sources(generated, faults)
    destination = folder / "fp8cutlass"
    places = ["--generated", str(generated), "--build-dir", str(folder / "work"), "--dest", str(destination)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    # With random waits: without, timing hides the missing wait for V from every test.
    _run(["scripts/build_extension.py", *places], environment | {"FP8CUTLASS_CUDA_FLAGS": "-DFP8CUTLASS_DELAY=1"})
    environment["FP8CUTLASS_LIBRARY"] = str(destination / "_C.so")
    for fault in faults:
        started = time.monotonic()
        if fault.by == "tests":
            caught, said = _by_tests(fault, environment)
        else:
            caught, said = _by_racecheck(fault, environment)
        yield Finding(fault.name, fault.kernel, fault.by, caught, said, time.monotonic() - started)


def _by_tests(fault: Fault, environment: dict[str, str]) -> tuple[bool, str]:
    of_the_walk = "_window_" in fault.kernel or fault.kernel.endswith("_ragged")
    file, test = ("test_gpu_varlen", "is_its_emulation") if of_the_walk else ("test_gpu_variants", "test_variant")
    if fault.name.startswith(("a cap", "sinks")):
        file, test = "test_gpu_scores", "is_its_emulation"
    if fault.name.startswith("a bias"):
        file, test = "test_gpu_bias", "is_its_emulation"
    if fault.name.startswith("integers"):
        file, test = "test_gpu_int8", "emulators"
    if fault.name.startswith("a mask"):
        file, test = "test_gpu_masks", "test_every_kernel"
    if fault.kernel.startswith("decode_"):
        file, test = "test_gpu_decode", "(exact or thousand)"
    if fault.kernel.startswith("resident_"):
        file, test = "test_gpu_resident", "(lengths or many_items or left)"
    if fault.name.startswith("lowered"):
        file, test = "test_gpu_varlen", "one_call_on_fp8"
    if fault.name.startswith("resident, ragged"):
        file, test = "test_gpu_resident_ragged", "(few or neighbours)"
    tests = [f"tests/gpu/{file}.py", "-k", f"{test} and {fault.kernel}"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TESTS_END)
    except subprocess.TimeoutExpired:
        return fault.hangs, f"no end in {TESTS_END:.0f} s{': the kernel hangs' if fault.hangs else ''}"
    failed = re.search(r"(\d+) failed", done.stdout)
    reason = re.search(r"^E +(\S.*)$", done.stdout, re.M)
    said = f"{failed[0] if failed else 'nothing failed'}: {reason[1] if reason else done.stdout.strip()[-200:]}"
    return done.returncode == 1 and failed is not None, said


def _by_racecheck(fault: Fault, environment: dict[str, str]) -> tuple[bool, str]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = ["scripts/sanitize.py", "--tool", "racecheck", "--only", fault.kernel, "--json", report.name]
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
        try:
            outcome = json.loads(Path(report.name).read_text())[0]
        except (ValueError, IndexError):
            return False, "no report"
    hazard = re.search(r"^=+ (Error: .*|.*hazard.*)$", outcome["text"], re.M)
    return outcome["status"] == "found", hazard[1] if hazard else outcome["text"].strip()[-200:] or outcome["status"]


def refused_by(name: str, kernel: str) -> Variant:
    """The variant of that id. LookupError unless this rule refuses it and no other would."""
    v = parse_id(kernel)
    refused, whole = check_rules(v), FAMILIES[v.family]
    FAMILIES[v.family] = replace(whole, rules=tuple(rule for rule in whole.rules if rule.name != name))
    try:
        otherwise = check_rules(v)
    finally:
        FAMILIES[v.family] = whole
    if refused is None or refused.rule != name or otherwise is not None:
        raise LookupError(f"{kernel} is refused by {refused}, without {name} by {otherwise}")
    return v


def by_compiling(folder: Path) -> Iterator[Finding]:
    """Kernels that a rule refuses, compiled as if there were no such rule, and held to the gates."""
    tools = open_toolbox()
    for rule, kernel, gate in SWITCHED_OFF:
        started = time.monotonic()
        v = refused_by(rule, kernel)
        sources = render({"sm90a": (v,)}, folder / "generated")
        measured, failures = measure_all(sources, tools, folder, 1, lambda line: None)
        failures += [failure for source, m in measured.items() for failure in check(source, m)]
        found = [failure for failure in failures if failure.gate == gate]
        said = found[0].message if found else f"gates that failed: {sorted({f.gate for f in failures})}"
        of_rule = re.search(rf'"?({rule}: [^"\n]*)', said)
        said = of_rule[1] if of_rule else said.splitlines()[0]
        caught = bool(found) and (gate != "COMPILE" or of_rule is not None)
        yield Finding(f"a rule: {rule} switched off", v.id, f"gate {gate}", caught, said, time.monotonic() - started)


def main() -> int:
    """The command line; returns 0 when every fault was noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-card", action="store_true", help="only what compiling shows")
    parser.add_argument("--fault", default="", metavar="TEXT", help="only faults of kernels whose name begins so")
    parser.add_argument("--json", type=Path, help="write what was found")
    options = parser.parse_args()
    findings = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        faults = tuple(f for f in FAULTS if f.name.startswith(options.fault))
        steps = [] if options.fault else [by_compiling(folder / "rules")]
        steps += [] if options.no_card else [on_the_card(folder, faults)]
        for step in steps:
            for finding in step:
                findings.append(finding)
                verdict = "noticed" if finding.caught else "NOT NOTICED"
                print(f"{finding.fault} ({finding.kernel}): {verdict} by {finding.by}: {finding.said}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(f) for f in findings], indent=1), encoding="utf-8")
    return 0 if all(f.caught for f in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
