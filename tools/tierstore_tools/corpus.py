"""Real text for long prompts: the sources of the running Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tierstore.errors import UsageError

Encode = Callable[[str], list[int]]

QUESTION = (
    "\n\n# The text above is part of a Python standard library.\n"
    "# Question: which module defines a class that is used by most of the others?\n# Answer:"
)
FOLLOW_UP = "\n\n# Question: and which of its methods would you call first?\n# Answer:"


def standard_library() -> Iterator[str]:
    """Yield the sources of the standard library's modules in alphabetical order, without its tests and
    without installed packages."""
    for path, name in _modules():
        yield f"# {name}\n" + path.read_text(encoding="utf-8", errors="replace")


@cache
def _modules() -> list[tuple[Path, str]]:
    """Return the files of the modules, and their names below the standard library's folder."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    found = ((path, path.relative_to(root)) for path in sorted(root.rglob("*.py")))
    return [(path, name.as_posix()) for path, name in found if not left_out & set(name.parts)]


def long_prompt(
    encode: Encode, tokens: int, *, text: str | None = None, skip: int = 0, question: str
) -> list[int]:
    """Return exactly ``tokens`` token ids: the beginning of ``text`` (or of the standard library's sources),
    and ``question`` at the end. The first ``skip`` tokens of the text are left out. Raises
    :class:`UsageError` if the text is too short.
    """
    ending = encode(question)
    wanted = tokens - len(ending)
    if wanted < 1:
        raise UsageError(
            f"a prompt needs more than the question's {len(ending)} tokens, {tokens} are too few"
        )
    body: list[int] = []
    for piece in [text] if text is not None else standard_library():
        body += encode(piece)
        if len(body) >= skip + wanted:
            return body[skip : skip + wanted] + ending
    raise UsageError(
        f"the text has only {len(body)} tokens, {skip + wanted} are needed: use a longer --prompt-file"
    )
