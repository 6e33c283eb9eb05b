"""What more memory would be worth: an estimate that a live store makes of its own traffic.

For a cache that lets the least recently used page go first, the *reuse distance* of a page says everything:
the bytes of all other pages that were used since its last use. A use is a hit in every cache that has room
for that distance, and in no smaller one. So one pass over the traffic gives the hit rate of all capacities at
once (Mattson et al., 1970), and a sample of the pages gives nearly the same curve for a small part of the
work: SHARDS (Waldspurger et al., FAST '15). A page is in the sample if its key, which is a hash, lies below a
border; distances in the sample are scaled up. When the sample grows too large, the border is lowered.

**Prefixes.** A hit needs the whole prefix, not only its last page. That comes out by itself if uses are put
in the right order: whoever uses a page uses all pages before it too, so a page is never older than those
behind it; and of one request the pages count as used from the last to the first, as they leave a tier. Then
the distances along a prompt never fall, and where one page is a hit, all before it are.

**Lookups ask, saves store.** A lookup is measured and marks what is known as used. What brings a page in is a
save, of it or of one behind it, or a lookup that finds it in the store (it may be on disk since an earlier
life): what was asked for and never saved is no hit the next time. A save that finds no room counts: with more
room it would have been stored.

**Common beginnings** are counted in full (``beginnings.py``): a system prompt that is a tenth of all uses
must not depend on which of its pages happen to be in the sample. The rest is scaled to what is known exactly:
how many pages were asked for.

**Cost.** A lookup leaves a note (``notes.py``: 0.1 µs where all of it is in the processor's cache, and up to
1 µs in the middle of other work). A thread works off a hundred notes at a time in one stroke of array
operations (``recency.py``: 10 to 60 µs a note), without the store's lock and for a four-hundredth of the time
at most (``worker.py``).

**Under load** (from about a hundred lookups and saves a second on) only every fifth group is looked at any
more, which stands for its neighbours (a *cell*, ``groups.py``), and the sample grows thinner until so few
prompts have a cell in it that all of these can be worked off. The others are not noted at all: finding out
takes a look at one key that the last page found keeps, and at those of the cells that were not found. What
was tried before was to look at all of these keys (a hundredth of a short lookup more), and at all groups'
keys. To leave out whole lookups instead would tear uses of a page from one another, and misses would be
counted that are none: of real conversations that came four times too fast, large capacities came out 12
points too low, and 21 when it was eight times. What is common to many prompts cannot be found in prompts that
were picked for their sampled groups, so it is counted in spot checks of all of them, taken at random
(``notes.py``; ``recency.py`` says what becomes of distances).

The border never rises again. A page that came into the sample late would count as never seen the first time,
and what a thin sample costs is only that small capacities are told apart less well. (As soon as there is time
for it, all prompts are noted again.) The notes of the moments until the sample is thin enough are left out
and counted.

**What it does not know** it says. Where a thin sample has fewer than some hundreds of pages, because the
pages that are in use are few and the load is many times too high, single capacities may be off by 10 points
and more. So each point has an error (``asked.py``), made of three things: how far eighths of the sample are
apart (``spread.py``), how far the hit rate goes up and down with the capacity where distances are made of so
few pages, and the share of what was left out. In simulations of many kinds of traffic at 1 to 16 times the
load that can be worked off, 94 to 100 % of the points were no further off than that; mostly it is three times
what the estimate is off. A larger sample would need more of the time; a floor under the sample, with notes
left out instead, tears uses from one another, which is worse.

Rejected: working them off in the lookup that fills the queue (a median of nothing, and a mean of 6 % of a
lookup); a tree or a list per page in Python (3 µs a use instead of 0.3); whole prompts as the unit of
sampling (they share their beginnings, so that a few of them decide everything; with an eighth of them
errors of 3 to 6 points were usual where groups give 1 to 2); a curve of each policy (what
a policy other than LRU gains is measured by replaying a trace, not here).

The estimate is forgotten when the store is closed, and what is half a day old counts a quarter.
"""

from tierstore.curve.curve import ReuseCurve
from tierstore.curve.notes import Notes
from tierstore.curve.stats import AddedRoom, CurvePoint, CurveStats, TierWorth
from tierstore.curve.table import HORIZON
from tierstore.curve.worker import Worker

__all__ = ["HORIZON", "AddedRoom", "CurvePoint", "CurveStats", "Notes", "ReuseCurve", "TierWorth", "Worker"]
