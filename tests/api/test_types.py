"""What a type checker says of calls: results have their types, and words that do not exist are found."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from fp8cutlass import attention, explain, supports

q = k = v = torch.empty(0)
plain: torch.Tensor = attention(q, k, v, is_causal=True).float()
pair: tuple[torch.Tensor, torch.Tensor] = attention(q, k, v, return_lse=True)
amax: tuple[torch.Tensor, torch.Tensor] = attention(q, k, v, return_amax=True)
three: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = attention(q, k, v, return_lse=True, return_amax=True)
either = attention(q, k, v, return_lse=bool(q.numel()))
served: tuple[bool, str] = supports(query=q, key=k, value=v, window_size=(5, 0), return_lse=True)
text: str = explain(q, k, v, scaling="head", scale=0.5)

attention(q, k, v, precision="fats")  # wrong
attention(q, k, v, scaling="row")  # wrong
attention(q, k, v, window=(5, 0))  # wrong
attention(q, k, v, return_lse=True).float()  # wrong
supports(query=q, key=k, value=v, nonsense=1)  # wrong
supports(query=q, key=k, value=v, layout="sbhd")  # wrong
"""


def test_a_checker_knows_results_and_words(tmp_path: Path) -> None:
    """A union as the result made every caller cast it, and a mistyped word was found at run time alone."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # The project's own settings and cache: torch was read when the project was checked, if it was.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    wanted = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wanted, done.stdout + done.stderr
