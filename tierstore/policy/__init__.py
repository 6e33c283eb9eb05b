"""Which page leaves a full tier next.

The store offers only pages that *may* leave: complete, not held, with no page behind them in the tier. A
policy answers ``score(facts)``, and the page with the lowest score leaves first. Facts are numbers: sizes,
depths, ticks of a logical clock, hits, hints. One instance serves one tier; the same classes order the tiers
of a live store and of the replay tool (``tierstore-bench replay``), which has other policies to compare with.

**Two kinds of tiers.** Memory tiers have an :class:`~tierstore.policy.queue.EvictionQueue`, in which a use
costs nothing. A disk holds millions of pages as columns of numbers and asks for all scores in one stroke. So
a policy is a formula over facts, and what has to be remembered of single pages is among the facts.

**Memory of evicted pages** (``ghosts.py``, 32 to 64 bytes a page): a page that comes back within a few
turnovers still has its hits. (Pages that were unloaded when they left the disk are not remembered: the page
table knows no keys.)

**The default** is :class:`FrequencyAgedLRU`. On a public trace of conversations it finds 14 % more than LRU
in a small cache and nowhere less than 1 % less. Where all pages that were used often are over at once, LRU
finds more: in made-up traffic up to 3 % (chats), 4 % (the documents that are asked for change) and 6 %
(prompts that are asked for six times and then never again, in a small cache).

**Scores that fall.** A hint that says "done", or a time to live that ends, makes the index offer the page
again. When a lifetime shrinks (``revision``), pages with an old score that is too high would stay until they
are in front, for a lifetime or two: in a large cache the default then lost 23 % to LRU. So for each page that
leaves after it, eight others are looked at again. Rejected: ordering everything anew at once, which would
hold the store's lock for a second and more per million pages.

Rejected: running LRU and a challenger as shadow caches over a sample and following the better one (the
outcome hung on which pages were in the sample: in 4 of 66 runs more than 1 % below LRU); a method per event
and lists in the policy, as caches in memory do it (it puts work on every use, and a disk would need millions
of list nodes); admission (a page that is not let in cuts off those behind it).
"""

from tierstore.policy.base import NO_HINT, Number, PageFacts, PageHint, Policy, Reuse, hint_score
from tierstore.policy.ghosts import GhostTable, fingerprint
from tierstore.policy.lru import LRU, FrequencyAgedLRU
from tierstore.policy.queue import EvictionQueue, QueueEntry

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (FrequencyAgedLRU, LRU)}
"""By the names of the setting ``policy``."""

DEFAULT_POLICY = FrequencyAgedLRU.name

__all__ = [
    "DEFAULT_POLICY",
    "LRU",
    "NO_HINT",
    "POLICIES",
    "EvictionQueue",
    "FrequencyAgedLRU",
    "GhostTable",
    "Number",
    "PageFacts",
    "PageHint",
    "Policy",
    "QueueEntry",
    "Reuse",
    "fingerprint",
    "hint_score",
]
