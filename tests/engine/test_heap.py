"""An engine's process is not stopped by collections of what never changes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from tierstore_engine import SamplingParams, build_engine, freeze_heap, load_model

model = load_model("tiny", device="cpu", dtype=None)
engine = build_engine(model, pool_pages=16, store=None)
before = len(gc.get_objects())
freeze_heap()
engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, ignore_eos=True))
print(before, len(gc.get_objects()))
engine.close()
"""


def test_a_full_collection_has_little_to_look_at():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after < before / 10
