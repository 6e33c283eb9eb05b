"""What a script is made of, and how its prompts are entered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tierstore.testing.faults.prompts import Life


@dataclass(frozen=True, slots=True)
class Save:
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Let ``pages`` pages leave the disk."""

    pages: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """Close the store and open it as ``lives[life]``."""

    life: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load what there is of a prompt, and compare every byte."""

    prompt: int


Step: TypeAlias = Save | Evict | Reopen | Load

Held: TypeAlias = dict[tuple[int, int], int]
"""(book, prompt) → leading tokens that are on disk. A book is the number of the first life with that spec
and model."""


def book_of(lives: Sequence[Life], life: int) -> int:
    """Where the pages of a life are entered: under the first life that can look them up."""
    return next(
        number
        for number, each in enumerate(lives)
        if (each.spec, each.model) == (lives[life].spec, lives[life].model)
    )
