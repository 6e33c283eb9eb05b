"""The prefix tree over chunks: which pages exist, in which tiers, who holds them, which may leave.

A *page* is a node: one chunk of tokens after one parent, under one identity (the root). A *copy* is that page
in one tier. A page without any copy is a *tombstone*: it stays in the tree only while pages below it have
copies (a copy lost to damage leaves one), and no match reaches past it.

The tree holds the pages that somebody has to do with. A page that is only on disk, and that nobody holds, may
be *unloaded*: it leaves the tree (:meth:`Index.unload`), is known to the disk tier alone, and is brought back
when a lookup comes by (:meth:`Index.reload`). Ancestors of a page in the tree are in the tree. So memory is
bounded by what is in use and not by what the disk holds.

Two rules keep every held page reachable by a lookup, and both are in :meth:`Page.may_leave`:

* no copy leaves a tier before the copies of its children in that tier (for the disk, whose pages may be
  unloaded, the disk tier's own count decides);
* no page gives up its last copy while it has children at all.

A key only finds a child; its tokens decide (``Page.tokens`` is compared on every match). Two chunks with
equal keys under one parent are *collisions*: both are kept, chained behind one dictionary entry.

Everything here is pure bookkeeping: no threads, no bytes, no clocks. The store calls it under its lock and
does what it says outside of it.
"""

from tierstore.index.index import Index, Leaving
from tierstore.index.page import LABELS, Copy, Page, Tier
from tierstore.index.tree import Match, Tree, common_tokens, tier_runs

__all__ = [
    "LABELS",
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
