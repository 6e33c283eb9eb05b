"""Tables: no cell is cut, no line is wider than the terminal, and all programs print through one function."""

from __future__ import annotations

import ast
import io
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tierstore.tables import print_table, table_lines, terminal_width

ROOT = Path(__file__).parents[2]
cells = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Zs", "Cc", "Mn")), min_size=1, max_size=30
)


@st.composite
def tables(draw):
    count = draw(st.integers(1, 8))
    columns = draw(st.lists(cells, min_size=count, max_size=count))
    rows = draw(st.lists(st.lists(cells, min_size=count, max_size=count), max_size=5))
    return columns, rows, draw(st.integers(0, count))


@given(tables(), st.sampled_from([10, 40, 80, 120]))
def test_every_cell_is_whole_and_no_line_is_wider_than_the_terminal_unless_a_cell_is(table, width):
    columns, rows, left = table
    lines = table_lines(columns, rows, left=left, width=width)
    from tierstore.printable import printable

    for row in rows:
        for cell in row:
            assert any(printable(cell) in line for line in lines)
    names = max(cell_len(printable(name)) for name in columns)
    widest = max((cell_len(printable(cell)) for row in (columns, *rows) for cell in row), default=0)
    if names + 2 + widest <= width:
        assert max(map(cell_len, lines), default=0) <= width


@given(tables())
def test_without_a_width_every_row_is_one_line(table):
    columns, rows, left = table
    assert len(table_lines(columns, rows, left=left)) == 1 + len(rows)


def test_columns_that_do_not_fit_follow_in_another_block():
    columns = ("model", "tokens", "bytes", "hit rate")
    rows = [("llama-3-8b", "100,000", "12.2 GiB", "97.1 %"), ("qwen", "4,096", "512 MiB", "3.0 %")]
    assert table_lines(columns, rows, width=32) == [
        "model        tokens     bytes",
        "llama-3-8b  100,000  12.2 GiB",
        "qwen          4,096   512 MiB",
        "",
        "model       hit rate",
        "llama-3-8b    97.1 %",
        "qwen           3.0 %",
    ]


def test_words_that_leave_no_room_become_records():
    rows = [("a/model/with/a/long/name", "7"), ("b", "8")]
    assert table_lines(("model", "pages"), rows, width=20) == [
        "model  a/model/with/a/long/name",
        "pages  7",
        "",
        "model  b",
        "pages  8",
    ]


def test_a_pipe_has_no_width():
    stream = io.StringIO()
    assert terminal_width(stream) is None
    print_table(("a", "b"), [("x" * 200, "1")], title="title", stream=stream)
    assert stream.getvalue() == "title\n" + "a" + " " * 199 + "  b\n" + "x" * 200 + "  1\n"


def test_no_program_has_a_table_of_its_own():
    """rich's tables cut cells short, so no module may use them."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    users = []
    for name in listed.stdout.split():
        text = (ROOT / name).read_text() if (ROOT / name).exists() else ""
        if name.startswith("tests/") or "rich" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == "rich.table":
                users.append(name)
    assert users == []
