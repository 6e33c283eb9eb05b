"""The disk tier: pages that outlive the process, in one directory with one owner and a hard byte cap.

::

    DIR                   flock by the owner
    DIR/lock              the owner's process id
    DIR/index.lmdb        the truth: what pages there are (index_db.py), and the payloads of small ones
    DIR/extents/000000 …  the other payloads, one linear space of slots (extents.py, slabs.py)

**What is where.** A payload of ``inline_bytes`` or less is in the index, in pieces of one LMDB page each.
All others are in extents, which are preallocated and move with O_DIRECT between the disk and the caller's
memory. (LMDB alone was tried: values of 1 MiB write at a fifth of the speed of extents, and each is in
memory twice.)

**How a page gets in.** ``reserve`` picks a place, in memory. ``write`` moves the payload there and takes
its checksum. ``commit`` syncs the extent files, and then writes record, inline payload, removals and use
times in one LMDB transaction. While one batch is being committed the next may be written.

**Why a crash does no harm.** A record exists only if its payload was on disk before it. A place is free
only when the transaction that removed its record is on disk, so no write ever lands under a record that a
crash could bring back. The free space is nowhere on disk: it is what the records leave over, rebuilt at
open, so that the two cannot disagree. Should the disk lie about any of this, the checksum (and for the
record its own, seeded with its serial) turns the damage into a miss. After a sync that failed, everything
written before it is refused by ``commit``: the kernel reports lost writes once, and then forgets them
(tier.py).

**How pages are read.** In requests of 1 to 4 MiB over neighbours, one for each of several threads, which also
takes the checksum while the bytes are in its cache. Small pages that lie apart go to the kernel in one call
(io.py), unless threads were found to be clearly faster when the directory was made (calibration.py).

**Damage and failure.** Bytes that are there and wrong are damage: the page will never be read again. A disk
that gives an error says nothing about its pages: they stay, whatever happens (payloads.py). Every call is
written down while it is under way (io.py), so that a disk that has stopped answering can be told from one
that has nothing to do. ``probe`` finds out whether one that failed is in order again.

**Why the cap holds.** The index's map size and the extent space are fixed at open, and with an allowance
for the rest they add up to less than the cap (space.py). Neither file can grow past its share. When a
directory is opened with another cap, the policy evicts pages until the others fit. Pages outside the slots of
the new space are moved, and then the extents are cut (fitting.py). An index file that is larger than its new
share is written anew, with the pages that the policy keeps (opening.py). The cap itself is in the directory
too, for fsck to compare with.

**What is read when.** Opening reads the index's facts (56 bytes a page) beside the first lookups, for free
space and the order of eviction (opening.py, page_table.py). Facts have no checksum: what they say of a page's
parent and place is taken from its record. After that a record is read when a lookup comes by: a link from
(parent, key) leads to it. So a store of millions of pages opens at once and costs 76 bytes of memory
each.

**Serials.** The index is keyed by serials, not by page keys: a parent's is always below its children's, and
two pages under one key are two pages. The root of each identity has one too (index_db.py).

**Rejected.** One file per page (a directory entry, an inode and two syncs for each). Buffered writes (a
sixth of the speed of O_DIRECT here, and they push everybody's page cache out). A free list on disk (one
more thing to keep consistent, to save a second at open). LMDB's ``metasync=False`` (a page that was
acknowledged could be lost). Growing LMDB's map while running (it races with readers).
"""

from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.page_table import PageTable
from tierstore.tiers.disk.payloads import PageRead, ReadBatch
from tierstore.tiers.disk.records import INLINE, PageRecord, PageUse, Removal
from tierstore.tiers.disk.tier import DiskStats, DiskTier

__all__ = [
    "INLINE",
    "DiskStats",
    "DiskTier",
    "FileIO",
    "PageRead",
    "PageRecord",
    "PageTable",
    "PageUse",
    "ReadBatch",
    "Removal",
]
