"""``examples/llamacpp_binding.py``, twice, over one daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "llamacpp_binding.py"


def test_the_second_process_restores_what_the_first_computed(models, daemon):
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, EXAMPLE, models(), daemon.url], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines()[-1])
    (first, answer), (second, again) = (line.split(" s, ")[1].split(": ", 1) for line in lines)
    assert (first, second) == ("computed", "restored")
    assert answer == again
