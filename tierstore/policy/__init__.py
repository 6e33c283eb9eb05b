"""Policies: which page leaves a full tier next.

The store offers only pages that *may* leave: complete, not held, and with no page behind them in the tier. A
policy implements ``score(facts)``, and the page with the lowest score leaves first. Facts are numbers: sizes,
depths, ticks of a logical clock, hits, hints. One instance serves one tier. The same classes order the tiers
of a live store and of the replay tool (``tierstore-bench replay``), which has more policies for comparison.

**Two kinds of tiers.** Memory tiers have an :class:`~tierstore.policy.queue.EvictionQueue`, in which a use
costs nothing. A disk has millions of pages as columns of numbers and needs all scores at once. So a policy is
a formula over facts, and everything to remember about single pages is in the facts.

**Memory of evicted pages** (``ghosts.py``, 32 to 64 bytes a page): a page that returns within a few turnovers
still has its hits. Pages that were unloaded before they left the disk are not remembered.

**The default** is :class:`FrequencyAgedLRU`. On a public trace of conversations, it finds 14 % more than LRU
in a small cache and never more than 1 % less. LRU finds more if all frequently used pages become useless at
once: up to 6 % in synthetic traffic.

**Falling scores.** When a hint says "done", or a time to live ends, the index offers the page again. When the
mean lifetime falls (``revision``), pages with an outdated, too high score would stay until they reach the
front, for one or two lifetimes. In a large cache, the default then lost 23 % against LRU. So for each page
that leaves after a revision, eight others are scored again.

Rejected alternatives:

* Sorting all pages of a tier in one go would hold the store's lock for a second or more per million pages.
* Two policies as shadow caches: the better one depends on the sample of the traffic.
* Linked lists in the policy: a disk tier would need millions of nodes.
* Admission control: a page that is not admitted cuts off those behind it.
"""

from tierstore.policy.base import EXPIRED, NO_HINT, Number, PageFacts, PageHint, Policy, Reuse, hint_score
from tierstore.policy.ghosts import GhostTable, fingerprint
from tierstore.policy.lru import LRU, FrequencyAgedLRU
from tierstore.policy.queue import EvictionQueue, QueueEntry

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (FrequencyAgedLRU, LRU)}
"""By their names in the setting ``policy``."""

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
