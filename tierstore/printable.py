from __future__ import annotations


def printable(text: str) -> str:
    r"""Escape characters that are not visible as themselves: control characters, line ends, and marks that
    change the direction of text. Names of models, tenants and clients may contain any character.

    >>> print(printable("llama\x1b[2J\n\u202e3"))
    llama\x1b[2J\n\u202e3
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
