"""The host time of a call: what counts, what does not, and what is said of it."""

from __future__ import annotations

import io

import pytest

from benchmarks import overhead
from benchmarks.overhead import WARM_UPS, HostTime, host_time
from benchmarks.results import write_records
from benchmarks.shapes import Shape, parse

SMALL = parse("1,1,64,64")


class Clock:
    """Nanoseconds that pass only when a call or a wait says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def spend(self, microseconds: float) -> None:
        self.now += round(1e3 * microseconds)


def test_the_time_of_a_call_is_the_hosts_alone() -> None:
    """Warm-ups, and what the card still does when the last call has returned, are not in it."""
    clock, calls, waits = Clock(), [0], [0]

    def call() -> None:
        calls[0] += 1
        clock.spend(1000 if calls[0] <= WARM_UPS else 10 if calls[0] <= WARM_UPS + 4 else 40)

    def synchronise() -> None:
        waits[0] += 1
        clock.spend(7)

    found = host_time("x", call, synchronise, calls=4, batches=3, clock=clock)
    assert (found.mean_us, found.median_us, found.min_us) == (30, 40, 10)
    assert found.behind_us == 7 / 4 and found.calls == 12
    assert calls[0] == WARM_UPS + 12 and waits[0] == 6


@pytest.mark.parametrize(("behind", "kept_up"), [(0.5, True), (9.9, True), (10.0, False), (300.0, False)])
def test_a_host_that_waited_for_the_card_is_told(behind: float, kept_up: bool) -> None:
    row = HostTime("attention", 100.0, 99.0, 98.0, behind, 50)
    assert row.kept_up == kept_up
    text = overhead.markdown({"card": "NVIDIA H200"}, SMALL, [row], [], [])
    assert f"| attention | 100.0 | 99.0 | 98.0 | {'yes' if kept_up else 'no'} |" in text.splitlines()


def test_every_step_runs_on_the_cpu_but_what_the_extension_does() -> None:
    """What breaks is named and does not take the rest with it."""
    todo = overhead.steps(SMALL, "cpu")
    assert [name.partition(":")[0] for name in todo if ":" in name] == ["part"] * 3 + ["torch"] * 2
    todo.pop("attention, bf16, torch.compile")  # seconds of a compiler
    found, failed = overhead.measure(todo, lambda: None, 1, 1)
    compiled = ["part: the extension's operator", "part: launch the kernel"]
    assert [row.what for row in found] == [what for what in todo if what not in compiled]
    assert len(failed) == 2 and all(map(str.startswith, failed, compiled))
    text = overhead.markdown({}, SMALL, found, failed, [])
    assert f"not timed: {failed[0]}" in text


def test_shared_heads_and_masks_reach_the_calls() -> None:
    todo = overhead.steps(Shape(64, True, 40, 40, 1, 4, 2), "cpu")
    for what in ("attention, bf16", "attention, FP8 with descales"):
        assert todo[what]().shape == (1, 4, 40, 64)  # type: ignore[attr-defined]


def test_profile_by_module() -> None:
    """Modules of the package by name, whatever the checkout is called; the rest is one line."""
    todo = overhead.steps(SMALL, "cpu")
    found = dict(overhead.by_module(todo["attention, bf16"], 2))
    assert {"api.attention", "call.plan", "torch and Python"} <= set(found) and "test_overhead" not in found
    assert list(found.values()) == sorted(found.values(), reverse=True) and min(found.values()) >= 0


def test_the_csv_has_the_stamp_and_all_numbers() -> None:
    file = io.StringIO()
    row = HostTime("a, b", 1.5, 1.25, 1.0, 0.5, 50)
    write_records(file, {"card": "NVIDIA H200", "commit": "abc"}, HostTime, [row])
    assert file.getvalue().splitlines() == [
        "# card: NVIDIA H200",
        "# commit: abc",
        "what,mean_us,median_us,min_us,behind_us,calls",
        '"a, b",1.5,1.25,1,0.5,50',
    ]
