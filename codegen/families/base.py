"""What a family of kernels is: one source, and everything that the generator must know about it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from codegen.arch import CARDS, TARGETS, Card
from codegen.cost import Cost, Shape
from codegen.derived import Derived
from codegen.rule import Rule
from codegen.variant import Variant


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """name: how ids and targets call it. template: its source.

    smem_per_block, smem_per_sm: shared memory that its kernels are laid out for, which all its targets have.
    model_card: the card whose numbers decide between its variants where nothing was measured.
    derive: what follows from a variant. rules: what is legal, in the order in which they are asked.
    cost: the model that ranks. view: what the template may ask beside the axes.
    """

    name: str
    template: str
    smem_per_block: int
    smem_per_sm: int
    model_card: str
    derive: Callable[[Variant], Derived]
    rules: tuple[Rule, ...]
    cost: Callable[[Variant, Shape, Card], Cost]
    view: Callable[[Variant], object]

    @cached_property
    def rules_of_choice(self) -> tuple[Rule, ...]:
        """The leading rules whose verdict all rivals of a problem share."""
        return tuple(itertools.takewhile(lambda rule: rule.of_choice, self.rules))

    @cached_property
    def other_rules(self) -> tuple[Rule, ...]:
        """The rules behind those."""
        return self.rules[len(self.rules_of_choice) :]

    @property
    def card(self) -> Card:
        return CARDS[self.model_card]

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(t.name for t in TARGETS.values() if self.name in t.families)

    @property
    def emulated(self) -> tuple[str, ...]:
        """Targets where it gives right results without the speed it was made for."""
        return tuple(name for name in self.targets if TARGETS[name].families[0] != self.name)
