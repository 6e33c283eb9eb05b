"""Text from elsewhere, made safe to show: a model, a tenant or a client has whatever name somebody chose."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape what would not be seen as itself: control characters, line ends, marks that turn text around.

    >>> print(printable("llama\x1b[2J\n\u202e3"))
    llama\x1b[2J\n\u202e3
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
