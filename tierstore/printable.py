"""Makes text from outside safe to show: names of models, tenants and clients are arbitrary."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape characters that are not visible as themselves: control characters, line ends, marks that change
    the direction of text.

    >>> print(printable("llama\x1b[2J\n\u202e3"))
    llama\x1b[2J\n\u202e3
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
