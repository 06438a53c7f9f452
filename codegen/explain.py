"""Why a kernel is chosen: the winner, the criterion, who was outranked and by how much, who was illegal and why."""

from __future__ import annotations

from codegen.arch import TARGETS
from codegen.families import FAMILIES
from codegen.keys import Key, bucket_text, representative
from codegen.legal import check
from codegen.profiles import profile_of
from codegen.select import Timing, measured_costs, modelled_costs, modelled_us, order, regret, rivals, timing
from codegen.table import CRITERIA, Decision, decide
from codegen.variant import Variant, parse_id


def explain(key: Key, emitted: tuple[Variant, ...]) -> str:
    """Text for people. `emitted` are the kernels that compete for the cell."""
    target = TARGETS[key.arch]
    lines = [
        f"problem  {key.arch} ({', '.join(target.cards)}), head_dim {key.head_dim}, keys {bucket_text(key.seqlen)}, "
        f"{key.dtype} -> {key.out}, {key.scaling} scaling, {'causal' if key.causal else 'no mask'}, "
        f"{key.precision}, {key.load} load",
    ]
    decision = decide(key, emitted)
    if decision.variant is None:
        return "\n".join([*lines, f"kernel   none: {decision.reason}"])
    winner = parse_id(decision.variant)
    family = FAMILIES[winner.family]
    card = family.card
    if key.arch in family.emulated:
        lines.append(
            f"family   {family.name}, emulated on {key.arch}: right results, without the speed of a kernel made for it"
        )
    judged = [(v, check(v)) for v in rivals(winner)]
    legal = [v for v, rejection in judged if rejection is None]
    illegal = [(v, rejection) for v, rejection in judged if rejection is not None]
    times = {v: timing(v, key.seqlen, key.load) for v in legal}
    terms = family.cost(winner, representative(card, key.seqlen, key.load, key.causal), card)
    lines += [
        f"kernel   {winner.id}",
        f"because  {decision.criterion}"
        + (
            f" (criteria in order: {', '.join(CRITERIA[1:])})"
            if decision.runner_up
            else ": one kernel is emitted for this problem"
        ),
        *_second(decision, times, key),
        _emitted(legal, emitted),
        _evidence(winner, times[winner], key),
        f"terms    a KV tile of a CTA takes {_enumerate(terms.terms)} cycles of an SM by the model; "
        f"{terms.resident} CTAs an SM, {terms.waves} waves; bound by {terms.bound}",
        f"profile  {profile_of(winner)}",
        "",
        "outranked (time over the winner's, both measured or both modelled; * is emitted):",
    ]
    width = max(len(v.shape) for v, _ in judged)
    for v in sorted(times, key=lambda v: order(v, times[v])):
        if v == winner:
            continue
        mark = "*" if v in emitted else " "
        text = f"({_us(times[v])} {_source(times[v])})"
        lines.append(f"  {mark} {v.shape:{width}} {_ratio(v, winner, times, key):5.2f}  {text}")
    lines += ["", "illegal:"]
    lines += [f"    {v.shape:{width}} {r.rule}: {r.message}" for v, r in illegal]
    return "\n".join(lines)


def _us(t: Timing) -> str:
    return f"{round(t.us, 2):.1f} us"  # rounded as in the table, then shown


def _source(t: Timing) -> str:
    return "measured" if t.measurement else "modelled"


def _ratio(v: Variant, winner: Variant, times: dict[Variant, Timing], key: Key) -> float:
    """Time over the winner's. The model's time of a rival is for another problem than a measured one of the winner."""
    if times[v].measurement or not times[winner].measurement:
        return times[v].us / times[winner].us
    return times[v].us / modelled_us(winner, key.seqlen, key.load)


def _second(decision: Decision, times: dict[Variant, Timing], key: Key) -> list[str]:
    """The emitted kernel that comes next, and by how much."""
    if decision.variant is None or decision.runner_up is None:
        return []
    winner, second = parse_id(decision.variant), parse_id(decision.runner_up)
    ratio = _ratio(second, winner, times, key)
    return [f"next     {second.shape}: {_us(times[second])} {_source(times[second])}, {ratio:.2f} of the kernel's"]


def _emitted(legal: list[Variant], emitted: tuple[Variant, ...]) -> str:
    chosen = tuple(v for v in legal if v in emitted)
    seen = {v.id: measured_costs(v) for v in legal}
    text = f"emitted  {len(chosen)} of {len(legal)} legal rivals: on average "
    if cells := {cell for of in seen.values() for cell in of}:
        return text + f"{regret(chosen, seen):.3f} of the best in the {len(cells)} lengths and loads with measurements"
    average = regret(chosen, {v.id: modelled_costs(v) for v in legal})
    return text + f"{average:.3f} of the modelled best over all lengths and loads of this problem"


def _evidence(v: Variant, t: Timing, key: Key) -> str:
    if (m := t.measurement) is not None:
        return (
            f"evidence measured: {_us(t)} (shortest {m.min_us:.1f}) on {m.card} at {m.clock_mhz} MHz "
            f"for {m.problem}{f', geometric mean with {m.others} more' if m.others else ''}; {m.toolchain}, "
            f"commit {m.commit}"
        )
    card = FAMILIES[v.family].card
    shape = representative(card, key.seqlen, key.load, key.causal)
    return (
        f"evidence model, not measured: {_us(t)} on one {card.name} at {card.clock} GHz for batch*heads "
        f"{shape.batch_heads}, {shape.seqlen_q} queries, {shape.seqlen_k} keys"
    )


def _enumerate(terms: tuple[tuple[str, float], ...]) -> str:
    parts = [f"{cycles:.0f} {name}" for name, cycles in terms]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
