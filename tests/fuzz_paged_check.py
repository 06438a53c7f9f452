"""One random call of ``attention_with_kvcache``, held sequence by sequence to float64 on what the cache holds.

What is more than that: a second call with other garbage gives the same bits, a sequence of NaN reaches no other one,
wild numbers of one sequence neither, and the tokens that the call appends are the bytes that ``append`` writes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from fuzz_judge import MANY, TABLE_LOGITS, Verdict, raised
from fuzz_paged import GIVEN, WILD, PagedCase
from fuzz_pages import PagedInputs, Raw, cache_of, fp8, paged_inputs, slots_of, spread, write
from layouts import on_card
from paged_cases import POISON, attention64

import fp8cutlass
from fp8cutlass import PagedKVCache, UnsupportedError
from fp8cutlass.accuracy.reference import Reference
from fp8cutlass.accuracy.ztest import summarise, z_scores
from fp8cutlass.call.kvlaunch import kernel_of as kernel_of_call
from fp8cutlass.choose.target import target
from fp8cutlass.emulator.decode import queries
from fp8cutlass.errors import NoKernelError

OTHER = 0x7E, (7, 2**20, 0, -5)  # garbage that is no NaN
# Half a step of a 16-bit output, relative, at least; and its smallest step.
OUT = {torch.bfloat16: (2.0**-8, 2.0**-134), torch.float16: (2.0**-11, 2.0**-25)}
SCORE = 2.0**-18  # of the sum of |q k|: what float32 loses of a logit, in steps of 16 columns
P = 2.0**-11  # half a step of P, which is f16
FLUSHED = 2.0**-126  # below it a float32 is 0 on a card
P_STEP = 2.0**-40  # of a row's largest: the smallest step of P
TANH = 2.0**-10.98  # the card's, relative
EQUAL = ("constant", "zeros", "tiny")  # values by which P are equal, or V is: their roundings are one


def run_paged_case(case: PagedCase, device: str) -> Verdict:
    """Run and judge one case; an error that is not documented is a failure."""
    try:
        return _run(case, device)
    except NoKernelError as error:
        return Verdict("unserved", details=(str(error),))
    except Exception as error:  # whatever it is, it belongs into the report with the case's number
        return raised(error, device)


def called(
    case: PagedCase, given: PagedInputs, raw: Raw, device: str, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call: out (tokens, H, D), and the LSE (H, tokens) where it is asked for. ``raw`` is on the device."""

    def numbers(values: Any) -> torch.Tensor:
        """On the device, with garbage behind them."""
        return torch.tensor([*values, *WILD], dtype=torch.int32).to(device)[: len(values)]

    options: dict[str, Any] = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    options |= {"softmax_scale": case.scale, "num_splits": case.splits, "return_lse": case.lse}
    options |= {"sinks": None if given.sinks is None else given.sinks.to(device)}
    options |= {"cache_seqlens": numbers(case.old), "max_seqlen_q": max(case.rows) if case.number % 3 == 0 else None}
    if case.cache in GIVEN:
        cache: Any = fp8(raw)
        names = zip(("k_descale", "v_descale"), given.descales, strict=True)
        options |= {name: d.to(device) if isinstance(d, torch.Tensor) else d for name, d in names}
    else:
        cache = cache_of(case, raw, given.descales)
    if case.cache != "rows":
        garbage = torch.full((len(case.keys), 3), WILD[case.number % len(WILD)], dtype=torch.int32)
        options["page_table"] = torch.cat((given.table, garbage), 1).to(device)[:, : case.columns]
    q = given.q.to(device)
    if case.dense:
        q = q.unflatten(0, (len(case.rows), case.rows[0]))
    else:
        options["cu_seqlens_q"] = numbers(case.begins)
    if case.new is not None:
        ranges = list(zip(case.old, case.keys, strict=True))
        options["k"], options["v"] = (
            torch.cat([x[slice(*of)] for x, of in zip(xs, ranges, strict=True)]).to(device) for xs in (given.k, given.v)
        )
        options["cu_seqlens_k_new"] = numbers([0, *torch.tensor(case.new).cumsum(0).tolist()])
    result = fp8cutlass.attention_with_kvcache(q, cache, **options | changes)
    out, lse = result if case.lse else (result, None)
    if case.dense:
        out = out.flatten(0, 1)
        lse = None if lse is None else lse.transpose(0, 1).flatten(1)
    return out, lse


def moved(raw: Raw, device: str) -> Raw:
    """A copy on the device."""
    return tuple(on_card(x) if device == "cuda" else x.clone() for x in raw)


def _run(case: PagedCase, device: str) -> Verdict:
    given = paged_inputs(case)
    raw = moved(given.raw, device)
    out, lse = called(case, given, raw, device)
    missed = _appended(case, given, raw)
    again = paged_inputs(case, *OTHER)
    if not _same(called(case, again, moved(again.raw, device), device), (out, lse)):
        missed.append("other bytes in free slots, or numbers past an end, change a bit")
    if case.poisoned >= 0:
        broken = moved(given.raw, device)
        poison(case, given, broken, case.poisoned)
        if not _same(called(case, given, broken, device), (out, lse), except_rows(case, case.poisoned)):
            missed.append(f"sequence {case.poisoned} of NaN changes another one")
    missed += _wild(case, given, device)
    missed += _elsewhere(case, out, lse)
    for s, reference in enumerate(references(case, given, raw)):
        at = rows_of(case, s)
        one = out[at].transpose(0, 1)[None].cpu()
        sums = None if lse is None else lse[None, :, at].cpu()
        missed += [f"sequence {s}: {text}" for text in judged(case, s, reference, one, sums, device)]
    return Verdict("failed" if missed else "passed", kernel_of(case, device), tuple(missed))


def kernel_of(case: PagedCase, device: str) -> str:
    """Which kernel ran: some of the card's head_dim, whatever its rows; the emulator on the CPU."""
    if device != "cuda":
        return "the emulator of decode"
    at = target(torch.device(device))
    most = max(case.rows) if case.number % 3 == 0 else None
    tokens, sequences = int(sum(case.rows)), len(case.rows)
    return kernel_of_call(at, case.head_dim, case.heads, case.kv_heads, tokens, sequences, most)[0].id


def rows_of(case: PagedCase, s: int) -> slice:
    return slice(case.begins[s], case.begins[s + 1])


def except_rows(case: PagedCase, s: int) -> torch.Tensor:
    """(tokens,) bool: those of other sequences."""
    rest = torch.ones(case.begins[-1] + case.behind, dtype=torch.bool)
    rest[rows_of(case, s)] = False
    return rest


Result = tuple[torch.Tensor, torch.Tensor | None]


def _same(some: Result, others: Result, rows: torch.Tensor | None = None) -> bool:
    """Bits of these rows, or of all."""
    of = slice(None) if rows is None else rows.to(some[0].device)
    pairs = [(some[0][of], others[0][of])]
    if some[1] is not None and others[1] is not None:
        pairs.append((some[1][:, of], others[1][:, of]))
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)


def poison(case: PagedCase, given: PagedInputs, raw: Raw, s: int) -> None:
    """The old keys and values of a sequence become NaN."""
    views = cache_of(case, raw, given.descales).views()
    at = slots_of(case, given.table, s, 0, case.old[s]).to(raw[0].device)
    for x in (views.k, views.v):
        x[at // case.page_size, at % case.page_size] = POISON


def _wild(case: PagedCase, given: PagedInputs, device: str) -> list[str]:
    """Page numbers and a length of one sequence that lie: refused on the CPU, clamped on a card, where without splits
    no other sequence changes by a bit."""
    s = case.wild
    used, table = list(case.old), given.table.clone()
    used[s] = WILD[case.number % len(WILD)]
    if case.cache != "rows":
        table[s] = torch.tensor([WILD[(case.number + i) % len(WILD)] for i in range(table.shape[1])])
    changes: dict[str, Any] = {"num_splits": 1, "cache_seqlens": torch.tensor(used, dtype=torch.int32).to(device)}
    changes |= {} if case.cache == "rows" else {"page_table": table.to(device)}
    if device != "cuda":
        try:
            called(case, given, moved(given.raw, device), device, **changes)
        except UnsupportedError:
            return []
        return [f"the length {used[s]} of sequence {s} is not refused"]
    right = called(case, given, moved(given.raw, device), device, num_splits=1)
    found = called(case, given, moved(given.raw, device), device, **changes)
    return [] if _same(found, right, except_rows(case, s)) else [f"wild numbers of sequence {s} change another one"]


def _elsewhere(case: PagedCase, out: torch.Tensor, lse: torch.Tensor | None) -> list[str]:
    """What is wrong with the tokens of no sequence."""
    rest = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
    rest[case.begins[0] : case.begins[-1]] = False
    missed = [] if bool((out[rest] == 0).all()) else ["tokens of no sequence are not 0"]
    if lse is not None and not bool(lse[:, rest].isneginf().all()):
        missed.append("the LSE of tokens of no sequence is not -inf")
    return missed


def _appended(case: PagedCase, given: PagedInputs, raw: Raw) -> list[str]:
    """The cache after the call against one that got the tokens by their slots on the CPU, byte by byte; and both
    against the tokens."""
    wanted = moved(given.raw, "cpu")
    cache = cache_of(case, wanted, given.descales)
    if case.new is not None:
        ranges = list(zip(case.old, case.keys, strict=True))
        write(case, cache, (given.k, given.v), given.table, given.descales, ranges)
    if not all(torch.equal(x.cpu(), y) for x, y in zip(raw, wanted, strict=True)):
        return ["the cache has other bytes than append writes"]
    missed = []
    k, v = held(case, given, cache)
    for name, found, given_to_it, static in (("K", k, given.k, case.static), ("V", v, given.v, True)):
        for s, (x, y) in enumerate(zip(found, given_to_it, strict=True)):
            if not len(y):
                continue
            most = spread(case, given.descales[name == "V"])[s][:, None] * 448 if static else math.inf
            if name == "V" and case.cache == "native pow2":
                most = math.inf
            y = y.float().clamp(-most, most) if isinstance(most, torch.Tensor) else y.float()
            # Half a step of e4m3; of a smaller number that of the row, or of a page's largest for V by powers of two.
            size = y.abs().amax() if most is math.inf else torch.as_tensor(most)
            if not bool(((x - y).abs() <= 2.0**-4 * 1.001 * y.abs() + size * 2.0**-17).all()):
                missed.append(f"sequence {s}: {name} in the cache is not what was appended")
    return missed


def held(case: PagedCase, given: PagedInputs, cache: PagedKVCache) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of each sequence as attention reads them, (keys, Hkv, D) float32."""
    found = cache.dequantise(given.table, torch.tensor(case.keys, dtype=torch.int32))
    parts = []
    for x, descale in zip(found, given.descales, strict=True):
        of = spread(case, descale) if case.cache in GIVEN else torch.ones(len(case.keys), 1)
        parts.append([x[s, :, :n].transpose(0, 1) * of[s][:, None] for s, n in enumerate(case.keys)])
    return parts[0], parts[1]


def references(case: PagedCase, given: PagedInputs, raw: Raw) -> list[Reference]:
    """Of each sequence, from what is in the cache and Q as the kernel holds it."""
    k, v = held(case, given, cache_of(case, tuple(x.cpu() for x in raw), given.descales))
    q16, descale = queries(given.q)
    q = q16.double() * descale.double()
    return [
        attention64(q[rows_of(case, s)], k[s], v[s], case.softmax_scale, *case.ends, case.softcap, given.sinks)
        for s in range(len(case.rows))
    ]


def judged(
    case: PagedCase, s: int, reference: Reference, out: torch.Tensor, lse: torch.Tensor | None, device: str
) -> list[str]:
    """The gates that the result of a sequence, (1, H, rows, D), misses."""
    missed = []

    def hold(name: str, figure: float, limit: float) -> None:
        if not figure <= limit:  # a NaN misses
            missed.append(f"{name} {figure:.4g} > {limit:.4g}")

    dead = reference.lse == -torch.inf
    hold("elements that are no number", float((~out.isfinite()).sum()), 0)
    hold("largest of the rows without keys", float(out[dead].abs().sum()), 0)
    if lse is not None:
        hold("rows that wrongly have keys, or none", float(((lse == -torch.inf) != dead).sum()), 0)
    if bool(dead.all()):
        return missed
    scores, partial = _sizes(case, reference)
    loss = SCORE * partial + (TANH * scores if case.softcap and device == "cuda" else 0.0)
    if lse is not None:
        limit = 2e-5 * max(1.0, float(reference.lse[~dead].abs().max())) + loss
        hold("LSE", float((lse.double() - reference.lse)[~dead].abs().max()), limit)
    relative, step = OUT[out.dtype]
    a, v = reference.probabilities, reference.values
    fine = P_STEP * a.amax(-1, keepdim=True) * v.abs().amax(2, keepdim=True) * v.shape[2]
    if device == "cuda":  # a weight below the smallest normal number is 0 there, and so is a result
        fine = fine + FLUSHED * (1 + v.abs().amax(2, keepdim=True))
    bound = relative * reference.out.abs() + (P + 2 * loss) * 1.1 * (a @ v.abs()) + fine + step
    over = ((out.double() - reference.out).abs() / bound)[~dead]
    hold("an element, by its bound,", float(over.max()), 1.0)
    many = over.shape[0] >= MANY and case.keys[s] >= MANY
    if many and loss <= P / 4 and scores <= TABLE_LOGITS and case.values[s] not in EQUAL:
        z = summarise(z_scores(out, reference, "f16")[~dead][None, None], out[~dead][None, None])
        missed += [f"z: {text}" for text in z.refusals()]
    return missed


def _sizes(case: PagedCase, reference: Reference) -> tuple[float, float]:
    """The largest magnitude of a logit that some row sees, and of the sums of its terms' magnitudes."""
    terms = float((reference.queries.abs() @ reference.keys.abs().transpose(-1, -2)).max())
    logits = (reference.queries @ reference.keys.transpose(-1, -2)).abs().max()
    return min(float(logits), case.softcap or math.inf), terms
