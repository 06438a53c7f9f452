"""What `fp8cutlass.served()` counts: by key, at run time, nested, with a limit, and said once in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

import fp8cutlass
from fp8cutlass import stats
from fp8cutlass.stats import Count, Key, Reason


@pytest.fixture(autouse=True)
def counted_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing, as each test sees it."""
    monkeypatch.setattr(stats, "_counts", {})
    monkeypatch.setattr(stats, "_base", {})
    yield


def test_calls_are_counted_by_door_class_and_kernel_or_reason() -> None:
    work = stats.work(2, 4, 10, 20, 96)
    assert work == 2 * 4 * 10 * 20 * 96 and stats.work(2, 4, 10, 20, 96, causal=True) == work // 2
    for _ in range(3):
        stats.count_served("door", "Layer", "kernel", work)
    stats.count_fallback("door", "Layer", Reason.MASK, work=work)
    stats.count_fallback("door", "Layer", Reason.GRAD)
    found = fp8cutlass.served()
    assert found.counts == {
        Key("served", "door", "Layer", "kernel"): Count(3, 3 * work),
        Key("fallback", "door", "Layer", "mask"): Count(1, work),
        Key("fallback", "door", "Layer", "grad"): Count(1, 0),
    }
    assert found.served == (3, 3 * work) and found.fallback == (2, work) and found.share == 0.75
    lines = str(found).splitlines()
    assert lines[0] == "served 3 of 5 attention calls in FP8 (60%), 75% of the work"
    assert f"  not served: door Layer x1: mask ({stats.remedy('mask')})" in lines[1:]
    assert "  served: door Layer x3: kernel" in lines[1:] and len(lines) == 4


def test_nothing_counted_says_so() -> None:
    assert str(fp8cutlass.served()) == "no attention call came through a door of fp8cutlass"
    assert fp8cutlass.served().share == 0.0


def test_without_work_the_share_is_one_of_calls() -> None:
    stats.count_served("door")
    stats.count_fallback("door", "", Reason.SHORT)
    assert fp8cutlass.served().share == 0.5


def test_every_reason_has_one_line_of_remedy() -> None:
    assert set(stats.REMEDIES) == set(Reason)
    for text in stats.REMEDIES.values():
        assert text and "\n" not in text and not text.endswith(".")


def test_reset_is_for_served_alone() -> None:
    with stats.collect() as seen:
        stats.count_served("door")
        stats.reset()
        assert fp8cutlass.served().served.calls == 0
        stats.count_served("door")
    assert fp8cutlass.served().served.calls == 1 and seen.result().served.calls == 2


def test_blocks_lie_in_one_another_and_end() -> None:
    with stats.collect() as outer:
        stats.count_served("a")
        with stats.collect() as inner:
            stats.count_served("b")
            assert inner.result().served.calls == 1
        stats.count_served("b")
    stats.count_served("c")
    assert [key.door for key in inner.result().counts] == ["b"] and inner.result().served.calls == 1
    assert outer.result().served.calls == 3 and str(outer).startswith("served 3 of 3")


def test_expect() -> None:
    with stats.expect(min_share=0.5):
        stats.count_served("door", work=10)
        stats.count_fallback("door", "Layer", Reason.WINDOW, work=10)
    with pytest.raises(stats.ShareError, match="expected 60% .*served 1 of 2 .*50% of the work\n.*Layer x1: window"):
        with stats.expect(min_share=0.6):
            stats.count_served("door", work=10)
            stats.count_fallback("door", "Layer", Reason.WINDOW, work=10)
    with pytest.raises(stats.ShareError, match="no attention call"), stats.expect(min_share=0.0):
        pass
    with pytest.raises(KeyError, match="mine"), stats.expect():
        raise KeyError("mine")


def test_keys_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "MOST_KEYS", 3)
    for n in range(6):
        stats.count_served("door", f"Layer{n}", work=1)
    stats.count_served("door", "Layer0", work=1)
    for n in range(2):
        stats.count_fallback("door", f"Layer{n}", Reason.MASK)
    found = fp8cutlass.served().counts
    assert found[Key("served", stats.OTHER, "", stats.OTHER)] == (3, 3)
    assert found[Key("served", "door", "Layer0", "")] == (2, 2)
    assert found[Key("fallback", stats.OTHER, "", stats.OTHER)] == (2, 0) and len(found) == 5
    assert "other x2: other (too many different keys to tell)" in str(fp8cutlass.served())


def test_the_first_fallback_of_a_key_is_logged_with_its_remedy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp8cutlass.fallback")
    for _ in range(3):
        stats.count_fallback("door", "Layer", Reason.DTYPE, "float32")
        stats.count_served("door", "Layer")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("fp8cutlass.fallback", logging.INFO)
    said = "door Layer: attention is not served in FP8: dtype (float32); run the model in bfloat16 or float16"
    assert record.getMessage() == said
    stats.count_fallback("door", "Other", Reason.DTYPE)
    stats.count_fallback("door", "Layer", Reason.GRAD)
    assert [r.getMessage().split(";")[0].split(": ")[-1] for r in caplog.records[1:]] == ["dtype", "grad"]


def test_threads_lose_no_count() -> None:
    def many() -> None:
        for _ in range(2000):
            stats.count_served("door", work=1)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fp8cutlass.served().served == (8000, 8000)


def layers(x: torch.Tensor) -> torch.Tensor:
    """Two calls of one layer that are served, one of another that is not."""
    for _ in range(2):
        stats.count_served("door", "Layer", "", stats.work(1, 1, x.shape[0], x.shape[0], 2), at=x)
        x = x.sin()
    stats.count_fallback("door", "Layer", Reason.MASK, "a text", x.shape[0], at=x)
    return x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_programs_count_at_each_run_and_compile_once(backend: str) -> None:
    """A dict that traced code changes is counted, too, but Dynamo compiles again at every call."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
    for n in (5, 5, 6, 9):
        x = torch.randn(n)
        with stats.collect() as seen:
            assert torch.equal(compiled(x), x.sin().sin())
        assert seen.result().counts == {
            Key("served", "door", "Layer", ""): Count(2, 2 * 2 * n * n),
            Key("fallback", "door", "Layer", "mask"): Count(1, n),
        }
    assert counter.frame_count == 1
    x = torch.randn(5, requires_grad=True)
    with stats.collect() as seen:
        compiled(x).sum().backward()
    assert x.grad is not None and (seen.result().served.calls, seen.result().fallback.calls) == (2, 1)
    torch._dynamo.reset()


def test_inductor_keeps_the_counter() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True)
    for _ in range(2):
        with stats.collect() as seen, torch.no_grad():
            compiled(torch.randn(7))
        assert (seen.result().served.calls, seen.result().fallback.calls) == (2, 1)
    torch._dynamo.reset()


def test_exported_programs_have_no_counter() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layers(x)

    program = torch.export.export(Model(), (torch.randn(5),))
    assert not [node for node in program.graph.nodes if "count" in str(node.target)]
    program.module()(torch.randn(5))
    assert not fp8cutlass.served().counts
