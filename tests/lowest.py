"""Print the lowest version of each dependency that pyproject.toml allows, as constraints for pip.

``python tests/lowest.py [EXTRA …]`` prints ``name==version`` for the base dependencies and the extras.
``make lowest`` installs them and runs the command line, the examples and the store's own tests with them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def lowest(extras: list[str]) -> list[str]:
    """Return the pins, sorted. A dependency without a lower bound is left out."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    found = (re.match(r"([A-Za-z0-9_-]+)(?:\[[^\]]*\])?>=([0-9.]+)", each) for each in wanted)
    return sorted({f"{match[1]}=={match[2]}" for match in found if match})


if __name__ == "__main__":
    sys.stdout.write("\n".join(lowest(sys.argv[1:])) + "\n")
