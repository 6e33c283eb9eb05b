"""Which page leaves a full tier next.

A policy is a small class that does no I/O, knows no clock and holds no page. The same objects order the tiers
of a live store and of the replay tool (``tierstore-bench replay``). One instance serves one tier.

**What it is asked.** The store offers only pages that *may* leave: complete, not held, with no page behind
them in the tier. A policy answers ``score(facts)``: the worth of keeping a page, of which the lowest leaves
first; among equals the one deepest in its prompt. Facts are numbers (``PageFacts``): sizes, depths, ticks of
a logical clock, hits, hints.

**Two kinds of tiers.** Memory tiers keep a heap that is brought up to date lazily (``queue.py``): a use costs
nothing there, and a page's worth is looked at again when it stands in front. A disk holds millions of pages
as columns of numbers and asks for the worth of all of them at once (``rank``, by default ``score`` on
arrays). So ``score`` has to be a formula over facts, and what a policy must remember of single pages has to
be among the facts. Three things were needed beyond LRU's, and no more:

* *memory of the departed* (``departed.py``, 32 to 64 bytes a page): a page that comes back within a few
  turnovers still has its hits. What S3-FIFO, 2Q and ARC call a ghost is one table here, for all policies and
  all tiers of a store. (Pages that were asleep on disk when they left it are not remembered: the ledger knows
  no keys.)
* *lines* (``segment``, ``turn``, ``spare``): two queues instead of one, and whether the first in line goes
  round once more. Pages change lines only when they come or stand in front, never when they are used. On disk
  there are no lines; what S3-FIFO, 2Q and SIEVE do there is said in ``lines.py``.
* *events* (``leaves``, ``accessed``), which most policies ignore: how long pages rest until they leave
  (``tenure``), what the clock says (``gdsf``), and a sample of all uses for shadow caches (``default``).

**Worth that falls.** A hint that says "done", or a time to live that ends, makes the index offer the page
again. When the duel switches, pages with an old worth that is too high would stay until they are in front,
for a lifetime or two, and cost more than the switch is worth. So for each page that leaves after it, eight
others in line are looked at again. (When a lifetime shrinks, nothing is.) Rejected: ordering everything anew
at once, which would hold the store's lock for a second and more per million pages.

**The default** is a duel (``duel.py``). LRU is hard to beat by much and easy to lose to: S3-FIFO finds more
in a small cache and less in a large one. ``tenure`` is LRU in which used pages may rest longer, and is better
wherever conversations go on or documents are shared; where what was used often is over, it is worse. So both
run as shadow caches over a sample of the pages, and the better one orders the real ones; LRU while there is
doubt, while it is a matter of less than a fiftieth of all hits, and again as soon as the other one has fallen
behind within two turnovers. Their worths only grow with a page's last use and its hits, and whoever uses a
page uses all before it. So in a shadow cache pages leave from the end of a prompt without anybody knowing
prompts, and a sample of pages is enough.

Rejected: a method per event and lists in the policy, as caches in memory do it (it puts work on every use,
and a disk would need millions of list nodes); ARC (2Q does the same with a fixed share, and no list has to
move on use); switching on hit rates instead of on paired accesses (more noise in the same time).
"""

from tierstore.policy.base import NO_HINT, Number, PageFacts, PageHint, Policy, Reuse
from tierstore.policy.duel import Duel
from tierstore.policy.frequency import FIFO, LFU
from tierstore.policy.gdsf import GDSF
from tierstore.policy.hinted import Hinted, Priority
from tierstore.policy.lines import S3FIFO, Sieve, TwoQ
from tierstore.policy.lru import LRU
from tierstore.policy.tenure import Tenure

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (LRU, Duel, FIFO, LFU, S3FIFO, Sieve, TwoQ, GDSF, Tenure, Hinted, Priority)
}
"""By the names of settings and of ``replay --policy``."""

DEFAULT_POLICY = Duel.name

__all__ = [
    "DEFAULT_POLICY",
    "FIFO",
    "GDSF",
    "LFU",
    "LRU",
    "NO_HINT",
    "POLICIES",
    "S3FIFO",
    "Duel",
    "Hinted",
    "Number",
    "PageFacts",
    "PageHint",
    "Policy",
    "Priority",
    "Reuse",
    "Sieve",
    "Tenure",
    "TwoQ",
]
