"""The prefix tree over chunks: which pages exist, in which tiers, which are held, and which may be evicted.

A *page* is a node: one chunk of tokens after one parent, under one identity (the root). A *copy* is that page
in one tier. A page without any copy is a *tombstone*: its copy was lost to damage, and pages below it still
have copies. No lookup matches past a tombstone.

The tree holds the pages in use. A page that is only on disk and is not held may be *unloaded*: it leaves the
tree (:meth:`Index.unload`) and only the disk tier knows it, until a lookup reloads it (:meth:`Index.reload`).
The ancestors of a page in the tree are also in the tree. So memory is proportional to the pages in use, not
to the pages on disk.

Two rules, both in :meth:`Page.may_leave`, keep every held page reachable by a lookup:

* No copy leaves a tier before the copies of its children in that tier. (Children on disk may be unloaded, so
  for the disk the disk tier's own count of children decides.)
* No page gives up its last copy while it has children.

A key only finds a child: each match also compares the tokens (``Page.tokens``). Two chunks with equal keys
under one parent are *collisions*. The tree keeps both, linked behind one dictionary entry.

This package is pure bookkeeping: no threads, no bytes, no clocks. The store calls it under the store's lock
and does the resulting work outside of the lock.
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
