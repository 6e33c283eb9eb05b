"""Real text for long prompts: the running Python's own standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from tierstore.errors import UsageError

Encode = Callable[[str], list[int]]

QUESTION = (
    "\n\n# The text above is part of a Python standard library.\n"
    "# Question: which module defines a class that is used by most of the others?\n# Answer:"
)
FOLLOW_UP = "\n\n# Question: and which of its methods would you call first?\n# Answer:"


def standard_library() -> Iterator[str]:
    """The sources of the standard library's modules, in alphabetical order, without its tests and packages
    installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(parts):
            yield f"# {'/'.join(parts)}\n" + path.read_text(encoding="utf-8", errors="replace")


def long_prompt(
    encode: Encode, tokens: int, *, text: str | None = None, skip: int = 0, question: str
) -> list[int]:
    """Exactly ``tokens`` token ids: running text (``text``, or the standard library), cut, and ``question``
    at the end. ``skip`` leaves out that many tokens of text first.

    Raises :class:`UsageError` when the text is too short.
    """
    ending = encode(question)
    wanted = tokens - len(ending)
    if wanted < 1:
        raise UsageError(
            f"a prompt needs more than the question's {len(ending)} tokens: {tokens} are too few"
        )
    body: list[int] = []
    for piece in [text] if text is not None else standard_library():
        body += encode(piece)
        if len(body) >= skip + wanted:
            return body[skip : skip + wanted] + ending
    raise UsageError(
        f"the text has only {len(body)} tokens, {skip + wanted} are needed: give a longer --prompt-file"
    )
