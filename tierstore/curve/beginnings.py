"""What many prompts begin with: a system prompt, a set of tools, a document that everybody asks about.

In a sample such pages would do harm: whether the few pages that a third of all uses go to are in it or not
decides the result. So they are found and counted in full. They come before all others in their prompts, and
so the beginning of a prompt is looked at in **stretches** of 1, 1, 1, 1, 2, 2, 4, 4, 8 … pages: a stretch
whose last group is asked for again and again is one thing, and as such is as good as one page."""

from __future__ import annotations

from tierstore.curve.groups import STRETCH_GROUPS, Groups
from tierstore.keys import PageKey

_ROUND = 512  # lookups; then all counts are halved
_MANY = 8  # lookups in a round or two that make a stretch a common one: of 1 to 1.6 % of all prompts …
_FEW = 3  # … and that it must have at least to stay one: fewer than that is 0.6 %
_MOST_COUNTED = 1024


class Beginnings:
    """Which beginnings are common now. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[PageKey, int] = {}  # lookups, by the last group of a stretch
        self._common: dict[PageKey, int] = {}  # last group of a stretch → hash of the stretch
        self._lookups = 0

    def common(self, groups: Groups) -> list[int]:
        """A hash for each of the common stretches at the beginning of a prompt of these groups."""
        hashes: list[int] = []
        for end in STRETCH_GROUPS:
            if end > len(groups) or (found := self._common.get(groups[end - 1])) is None:
                break
            hashes.append(found)
        return hashes

    def asked(self, groups: Groups) -> list[int]:
        """The same, for a prompt that was asked for: it is counted."""
        hashes: list[int] = []
        counts, common = self._counts, self._common
        for end in STRETCH_GROUPS:
            if end > len(groups):
                break
            key = groups[end - 1]
            count = counts[key] = counts.get(key, 0) + 1
            found = common.get(key)
            if found is None:
                if count >= _MANY:
                    common[key] = _hash(key)  # from the next time on: what is behind it is counted then, too
                break
            hashes.append(found)
        self._lookups += 1
        if self._lookups == _ROUND or len(counts) > _MOST_COUNTED:
            self._end_round()
        return hashes

    def _end_round(self) -> None:
        self._lookups = 0
        self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
        self._common = {key: found for key, found in self._common.items() if self._counts.get(key, 0) >= _FEW}


def _hash(key: bytes) -> int:
    # So small that it lies below every border, and that no single group has it.
    return int.from_bytes(key[:8], "big") >> 24
