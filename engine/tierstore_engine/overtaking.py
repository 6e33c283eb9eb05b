"""Count for how long each request has been overtaken. Pure: the scheduler reports what a step was spent on.

A request is *overtaken* by work that first come, first served would have put behind it. While there is room
for all waiting requests, that is the work for later requests. If slots or pages are short, a request also
waits for those before it to end, and these wait for one another. Then all work out of turn counts against
every request without room. So does a step in which a later request holds room that an earlier one needs.

The count does not show how first come, first served would have packed the steps. If several prompts share a
step, or answers run out of pages, another order of the same work may end differently, by up to the time of
the longest request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tierstore_engine.ordering import Place, WaitingEntry


@dataclass(slots=True)
class Spent:
    """The work of one step, by the requests that it is done for.

    ``prompts`` has tokens by the request that they are computed for. ``short``: slots or pages do not hold
    all waiting requests. ``first`` is the earliest request whose prompt is not computed. ``kept_out`` is the
    earliest request without room while a later one has some.
    """

    prompts: dict[Place, int] = field(default_factory=dict)
    short: bool = False
    first: Place | None = None
    kept_out: Place | None = None

    def overtakes(self, place: Place, *, admitted: bool = True) -> float:
        """Return the share of the step that counts against the request at ``place``.

        >>> Spent({(0, 1, 1): 40}).overtakes((0, 0, 0))
        1.0
        >>> Spent({(0, 0, 0): 30, (0, 1, 1): 10}).overtakes((0, 0, 0))
        0.25
        """
        later = sum(tokens for other, tokens in self.prompts.items() if other > place)
        if later and place not in self.prompts:
            return 1.0  # this request could have had that room
        if not admitted:
            out_of_turn = self.first is not None and any(other > self.first for other in self.prompts)
            if self.short and out_of_turn:
                return 1.0
            if self.kept_out is not None and self.kept_out <= place:
                return 1.0
        return later / sum(self.prompts.values()) if later else 0.0


def passed(entries: Iterable[WaitingEntry], spent: Spent, seconds: float, *, admitted: bool = True) -> None:
    """Charge a step of ``seconds`` to ``entries``. Either all of them have room, or none."""
    for entry in entries:
        entry.overtaken_s += seconds * spent.overtakes(entry.place, admitted=admitted)
