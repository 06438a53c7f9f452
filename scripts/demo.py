"""`make demo`: builds for this machine's card when there are kernels for it, then runs examples/demo.py.

Without such a card the demo runs on the CPU emulator, after a check that generated/ is what the generator writes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import build_extension, toolchain  # noqa: E402  (needs the path above)


def main() -> int:
    """Returns the exit status of the demo, or 1 when it could not be started."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), environment.get("PYTHONPATH")]))
    archs = build_extension.card_archs()
    if archs:
        try:
            build_extension.build(ROOT / "python" / "fp8cutlass", profile="dev", archs=archs)
        except (build_extension.BuildError, toolchain.ToolchainError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    else:
        print("no NVIDIA card that there are kernels for: running on the CPU", flush=True)
        environment["CUDA_VISIBLE_DEVICES"] = ""
        check = subprocess.run([sys.executable, "-m", "codegen", "--check"], cwd=ROOT)
        if check.returncode != 0:
            return check.returncode
    return subprocess.run([sys.executable, str(ROOT / "examples" / "demo.py")], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
