"""README: its program runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"])
def test_links_lead_somewhere(name):
    file = ROOT / name
    links = re.findall(r"\]\(([^)#]+)\)", file.read_text())
    missing = [link for link in links if "://" not in link and not (file.parent / link).exists()]
    assert missing == []


def test_the_program_in_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    pages = [bytes([number]) * (8 << 20) for number in range(2)]
    buffers = [bytearray(8 << 20) for _ in range(2)]
    names = {"tokens": list(range(128)), "pages": pages, "buffers": buffers}
    exec(program, names)
    assert names["hit"].tokens == names["loaded"].tokens == 128
    assert [bytes(buffer) for buffer in buffers] == pages
