"""Why a kernel is chosen: the winner, the criterion, who was outranked and by how much, who was illegal and why."""

from __future__ import annotations

from codegen.arch import CARDS, MODEL_CARD, TARGETS, family_of
from codegen.keys import Key, bucket_text, representative
from codegen.matrix import profile_of
from codegen.model import cost
from codegen.rules import check
from codegen.select import cell_costs, regret, rivals, variant_cost
from codegen.spec import Variant, parse_id
from codegen.table import CRITERIA, decide


def explain(key: Key, emitted: tuple[Variant, ...]) -> str:
    """Text for people. `emitted` are the kernels that compete for the cell."""
    target, card = TARGETS[key.arch], CARDS[MODEL_CARD]
    family = family_of(key.arch)
    lines = [
        f"problem  {key.arch} ({', '.join(target.cards)}), head_dim {key.head_dim}, keys {bucket_text(key.seqlen)}, "
        f"{key.dtype} -> {key.out}, {key.scaling} scaling, {'causal' if key.causal else 'no mask'}, "
        f"{key.precision}, {key.load} load",
    ]
    if key.arch in family.emulated:
        lines.append(
            f"family   {family.name}, emulated on {key.arch}: right results, without the speed of a kernel made for it"
        )
    decision = decide(key, emitted)
    if decision.variant is None:
        return "\n".join([*lines, f"kernel   none: {decision.reason}"])
    winner = parse_id(decision.variant)
    shape = representative(key)
    terms = cost(winner, shape, card)
    judged = [(v, check(v)) for v in rivals(winner)]
    legal = [v for v, rejection in judged if rejection is None]
    illegal = [(v, rejection) for v, rejection in judged if rejection is not None]
    chosen = tuple(v for v in legal if v in emitted)
    average = regret(chosen, {v.id: cell_costs(v) for v in legal})
    lines += [
        f"kernel   {winner.id}",
        f"because  {decision.criterion}"
        + (
            f" (criteria in order: {', '.join(CRITERIA[1:])})"
            if decision.runner_up
            else ": one kernel is emitted for this problem"
        ),
        f"emitted  {len(chosen)} of {len(legal)} legal tiles and stages: over all lengths and loads of this problem, "
        f"on average {average:.3f} of the modelled best",
        f"evidence {decision.evidence}, not measured: {decision.cost_us:.1f} us on one {MODEL_CARD} "
        f"at {card.clock} GHz for batch*heads {shape.batch_heads}, {shape.seqlen_q} queries, {shape.seqlen_k} keys",
        f"terms    a KV tile of a CTA takes {terms.tensor:.0f} tensor, {terms.smem:.0f} shared-memory, "
        f"{terms.issue:.0f} issue, {terms.mufu:.0f} MUFU and {terms.l2:.0f} L2 cycles of an SM; "
        f"{terms.resident} CTAs an SM, {terms.waves} waves; bound by {terms.bound}",
        f"profile  {profile_of(winner)}",
        "",
        "outranked (modelled time over the winner's; * is emitted):",
    ]
    times = {v: variant_cost(v, key.seqlen, key.load) for v in legal}
    for v in sorted(times, key=lambda v: (times[v], v.id)):
        if v == winner:
            continue
        mark = "*" if v in emitted else " "
        lines.append(
            f"  {mark} {str(v.tile) + '_s' + str(v.stages):14} {times[v] / times[winner]:5.2f}  ({times[v]:.1f} us)"
        )
    lines += ["", "illegal:"]
    lines += [f"    {str(v.tile) + '_s' + str(v.stages):14} {r.rule}: {r.message}" for v, r in illegal]
    return "\n".join(lines)
