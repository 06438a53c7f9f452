"""Processes of a real process group over gloo, on this machine: each runs one function and leaves what it found.

Without a card they are forks of one server, which has imported torch and done nothing else: that saves each of them
seconds. Their environment is the server's, which the first call starts. A fork could not use a card that the server
has looked for, so with a card each process starts anew."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)
IMPORTED = ["pytest", "torch", "torch.distributed.tensor.experimental._attention"]
LIMIT = 400.0  # seconds after which a rank is taken to hang


def run(ranks: int, work: Callable[..., Any], folder: Path, *args: Any, timeout: timedelta = TIMEOUT) -> list[Any]:
    """What ``work(rank, *args)`` returned on each rank; of one that ended by itself its exit code."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(IMPORTED)
    given = (ranks, str(folder), work, args, timeout)
    processes = [context.Process(target=_rank, args=(r, *given), daemon=True) for r in range(ranks)]
    for process in processes:
        process.start()
    found = []
    for r, process in enumerate(processes):
        process.join(LIMIT)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"rank {r} hangs")
        path = folder / f"{r}.pt"
        found.append(torch.load(path, weights_only=False) if path.exists() else process.exitcode)
    return found


def _rank(
    rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...], timeout: timedelta
) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from processes import one_of_many

    one_of_many()
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timeout)
    try:
        found = work(rank, *args)
    except Exception:
        found = traceback.format_exc()
    torch.save(found, f"{folder}/{rank}.pt")


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what a call raises; ("", "") if nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
