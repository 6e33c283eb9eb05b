"""Faulty kernels under ThreadSanitizer: ``python -m tests.engine.kernels.faulty NAME …`` runs faults.cu.

Beside :mod:`races`, without torch: under TSan importing it takes ten times as long as a kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.engine.kernels.executor import HostModule

if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stderr.write(f"running {name}\n")
        reversed_numbers = np.zeros(128, np.float32)
        launch = HostModule(Path(__file__).parent / "faults.cu", [name], races=True).function(name)
        launch((1,), (128,), (reversed_numbers,), shared_mem=512)
