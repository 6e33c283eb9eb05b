"""The short scripts whose every write point is crashed, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.campaigns.prompts import (
    Evict,
    Life,
    Load,
    Reopen,
    Save,
    Step,
    encoded_life,
    inline_life,
    odd_life,
    sealed_inline_life,
    sealed_life,
    small_pages,
)
from tierstore.units import KIB, MIB


@dataclass(frozen=True)
class Scene:
    """A script, and the lives in which it is played."""

    name: str
    lives: Sequence[Life]
    steps: Sequence[Step]
    tear_step: int = 8  # writes are torn at every such boundary of sectors


_EXTENTS = Life(small_pages(), disk_bytes=1 * MIB)
_CROWDED = Life(small_pages(), disk_bytes=448 * KIB)  # 18 pages
_CROWDED_INDEX = replace(inline_life(), disk_bytes=512 * KIB)

# Branches, partial pages, holes made by evictions and filled again (so that one commit has several writes).
_MIXED: Sequence[Step] = (
    Save(0, 40),
    Save(1, 64),
    Save(2, 70),
    Evict(3),
    Save(3, 64),
    Reopen(0),
    Save(4, 48),
    Evict(4),
    Save(5, 90),
    Save(2, 100),
)
_CROWD: Sequence[Step] = (
    *(Save(2 * number, 80) for number in range(4)),
    Reopen(0),
    Save(1, 64),
    Save(9, 80),
    Save(10, 80),
)

SCENES = (
    Scene("extents", [_EXTENTS], _MIXED, tear_step=1),
    Scene("inline", [inline_life()], _MIXED),
    Scene("odd sizes", [odd_life()], (Save(0, 40), Save(1, 48), Evict(2), Save(2, 64), Save(4, 17)), 1),
    Scene("crowded", [_CROWDED], _CROWD),
    Scene("crowded index", [_CROWDED_INDEX], (*_CROWD, *(Save(20 + number, 80) for number in range(6)))),
    Scene(
        "encoded",
        [
            encoded_life(),
            replace(encoded_life(), disk_codec="none"),
            replace(encoded_life(), disk_bytes=1 * MIB),
        ],
        (
            Save(0, 40),
            Save(1, 64),
            Evict(2),
            Reopen(1),
            Save(2, 48),
            Reopen(0),
            Save(1, 64),
            Reopen(2),
            Save(5, 160),
        ),
    ),
    Scene(
        "encrypted",
        [sealed_life(), replace(sealed_life(), disk_bytes=1 * MIB)],
        (Save(0, 40), Save(1, 64), Evict(2), Reopen(0), Save(2, 48), Save(1, 64), Reopen(1), Save(5, 160)),
    ),
    Scene(
        "encrypted, inline",
        [sealed_inline_life()],
        (Save(0, 40), Save(1, 64), Evict(3), Reopen(0), Save(2, 70), Save(3, 48)),
    ),
    Scene(
        "two layouts",
        [replace(_EXTENTS, disk_bytes=2 * MIB), odd_life()],
        (Save(0, 48), Save(1, 64), Reopen(1), Save(0, 48), Save(3, 33), Reopen(0), Save(2, 64), Reopen(1)),
    ),
    Scene(
        "smaller cap",
        [_EXTENTS, _CROWDED],
        (*(Save(2 * number, 128) for number in range(4)), Reopen(1), Save(1, 80), Reopen(0), Save(3, 80)),
    ),
)
"""Together they take less than a second, and have about 250 write points."""

_SHRINKING: Sequence[Step] = (
    *(Save(2 * number, 160) for number in range(8)),
    Reopen(1),
    Save(1, 80),
    Reopen(0),
    Save(3, 80),
)

SMALLER_INDEX = Scene(
    "smaller index", [replace(inline_life(), disk_bytes=2 * MIB), _CROWDED_INDEX], _SHRINKING
)
"""A life whose cap is below the size that the index has grown to; the old cap has room for both indexes."""

HARDLY_SMALLER_INDEX = Scene(
    "hardly smaller index", [inline_life(), replace(inline_life(), disk_bytes=840 * KIB)], _SHRINKING
)
"""The same, where there is little room beside the old index."""


def random_scene(seed: int, *, steps: int = 20, shrinking: bool = False) -> Scene:
    """A long script of its own for every seed; ``shrinking``: with reopenings under three quarters of the
    cap."""
    chance = random.Random(seed)
    plain = [_EXTENTS, _CROWDED, inline_life(), _CROWDED_INDEX, odd_life(), encoded_life()]
    lives = [chance.choice([*plain, replace(chance.choice(plain), encrypted=True)])]
    if shrinking:
        lives.append(replace(lives[0], disk_bytes=lives[0].disk_bytes * 3 // 4 // KIB * KIB))
    return Scene(f"random {seed}", lives, [_random_step(chance, len(lives)) for _ in range(steps)])


def _random_step(chance: random.Random, lives: int) -> Step:
    kind = chance.random()
    if kind < 0.6:
        return Save(chance.randrange(16), chance.randint(1, 128))
    if kind < 0.75:
        return Load(chance.randrange(16))
    if kind < 0.9:
        return Evict(chance.randint(1, 8))
    return Reopen(chance.randrange(lives))
