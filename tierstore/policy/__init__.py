"""Policies: which page leaves a full tier next.

The store offers only pages that *may* leave: complete, not held, and with no page behind them in the tier. A
policy implements ``score(facts)``, and the page with the lowest score leaves first. Facts are numbers: sizes,
depths, ticks of a logical clock, hits, hints. One instance of a policy serves one tier, of a live store or of
the replay tool (``tierstore-bench replay``), which has more policies for comparison.

**Two kinds of tiers.** Memory tiers have an :class:`~tierstore.policy.queue.EvictionQueue`, in which a use of
a page costs nothing. A disk has millions of pages, kept as columns of numbers, and needs all scores at once.
So a policy is a formula over facts and keeps no state about single pages.

**Memory of evicted pages** (``ghosts.py``, 32 to 64 bytes a page): a page that returns within a few turnovers
of the store keeps its count of hits. Pages that were unloaded before they left the disk are not remembered.

**The default** is :class:`FrequencyAgedLRU`. On a public trace of conversations, it has 14 % more hits than
LRU in a small cache and never more than 1 % fewer. If all frequently used pages become useless at once, LRU
has up to 6 % more hits (measured with synthetic traffic).

**Falling scores.** When a hint says "done", or a time to live ends, the index offers the page again. When the
mean lifetime of pages falls (``revision``), queued pages have outdated scores that are too high. Such pages
would stay for one or two lifetimes, until they reach the front of the queue. In a large cache, the default
policy then had 23 % fewer hits than LRU. So for each page that leaves after a revision, eight queued pages
are scored again.

Rejected alternatives:

* Sorting all pages of a tier at once: the store's lock would be held for a second or more per million pages.
* Two policies as shadow caches: which policy wins depends on the sample of the traffic.
* Linked lists in the policy: a disk tier would need millions of nodes.
* Admission control: if one page is not admitted, the pages behind it cannot be found.
"""

from tierstore.policy.base import EXPIRED, NO_HINT, Number, PageFacts, PageHint, Policy, Reuse, hint_score
from tierstore.policy.ghosts import GhostTable, fingerprint
from tierstore.policy.lru import LRU, FrequencyAgedLRU
from tierstore.policy.queue import EvictionQueue, QueueEntry

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (FrequencyAgedLRU, LRU)}
"""The policies by their names in the setting ``policy``."""

DEFAULT_POLICY = FrequencyAgedLRU.name

__all__ = [
    "DEFAULT_POLICY",
    "EXPIRED",
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
