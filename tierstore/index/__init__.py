"""The prefix tree over chunks: which pages exist, in which tiers, which are held, and which may be evicted.

A *page* is a node: one chunk of tokens after one parent, under one identity (the root). A *copy* is that page
in one tier. A page without any copy is a *tombstone*, left by a copy that was lost to damage. It stays in the
tree only while pages below it have copies, and no match continues past it.

The tree holds the pages in use. A page that is only on disk and is not held may be *unloaded*: it leaves the
tree (:meth:`Index.unload`) and is known only to the disk tier. A lookup that needs it brings it back
(:meth:`Index.reload`). The ancestors of a page in the tree are also in the tree. So memory is bounded by the
pages in use, not by those on disk.

Two rules keep every held page reachable by a lookup. Both are in :meth:`Page.may_leave`:

* No copy leaves a tier before the copies of its children in that tier. (For the disk, whose pages may be
  unloaded, the disk tier's own count decides.)
* No page gives up its last copy while it has children.

A key only finds a child; the tokens decide (``Page.tokens`` is compared on every match). Two chunks with
equal keys under one parent are *collisions*: both are kept, chained behind one dictionary entry.

This package is pure bookkeeping: no threads, no bytes, no clocks. The store calls it under its lock and does
the resulting work outside of the lock.
"""

from tierstore.index.index import Ages, Index, Leaving
from tierstore.index.page import LABELS, Copy, Page, Tier
from tierstore.index.tree import Match, Tree, common_tokens, tier_runs

__all__ = [
    "LABELS",
    "Ages",
    "Copy",
    "Index",
    "Leaving",
    "Match",
    "Page",
    "Tier",
    "Tree",
    "common_tokens",
    "tier_runs",
]
