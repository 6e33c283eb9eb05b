"""For how long each request has been overtaken. Pure: the scheduler says what a step was spent on.

A request is *overtaken* by what first come, first served would have put behind it. While there is room for
all that wait, that is what is computed for later requests. Where slots or pages are short, a request also
waits for those before it to end, and these wait for one another: so whatever is computed out of turn counts
against everyone who has no room yet, and so does a step through which somebody later holds the room of
somebody before.

What this cannot see is how the steps would have been packed by first come, first served: where several
prompts share a step, or answers run out of pages, an order that does as much work may end it otherwise, by
as much as the longest request takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tierstore_engine.ordering import Place, WaitingEntry


@dataclass(slots=True)
class Spent:
    """What a step is spent on: tokens of ``prompts``, by the request for whose sake. ``short`` says that
    slots or pages do not hold all that waits, ``first`` is the first in line of those whose prompts are not
    computed, and ``kept_out`` the first that found no room while somebody later has some."""

    prompts: dict[Place, int] = field(default_factory=dict)
    short: bool = False
    first: Place | None = None
    kept_out: Place | None = None

    def overtakes(self, place: Place, *, admitted: bool = True) -> float:
        """The share of the step for which it counts against the request at ``place``.

        >>> Spent({(0, 1, 1): 40}).overtakes((0, 0, 0))
        1.0
        >>> Spent({(0, 0, 0): 30, (0, 1, 1): 10}).overtakes((0, 0, 0))
        0.25
        """
        later = sum(tokens for other, tokens in self.prompts.items() if other > place)
        if later and place not in self.prompts:
            return 1.0  # the room that it takes could have been this one's
        if not admitted:
            out_of_turn = self.first is not None and any(other > self.first for other in self.prompts)
            if self.short and out_of_turn:
                return 1.0
            if self.kept_out is not None and self.kept_out <= place:
                return 1.0
        return later / sum(self.prompts.values()) if later else 0.0


def passed(entries: Iterable[WaitingEntry], spent: Spent, seconds: float, *, admitted: bool = True) -> None:
    """A step took so many seconds, and all of ``entries`` have room, or none of them has."""
    for entry in entries:
        entry.overtaken_s += seconds * spent.overtakes(entry.place, admitted=admitted)
