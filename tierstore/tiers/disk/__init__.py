"""The disk tier: pages that outlive the process, in one directory with one owner and a hard byte cap.

::

    DIR                   flock by the owner
    DIR/lock              the owner's process id
    DIR/index.lmdb        the truth: what pages there are (index_db.py), and the payloads of small ones
    DIR/extents/000000 …  the other payloads, one linear space of slots (extents.py, slabs.py)

**What is where.** A payload of ``inline_bytes`` or less is in the index, in pieces of one LMDB page each. All
other payloads are in extents, which are preallocated and use O_DIRECT between the disk and the caller's
memory.

**How a page is saved.** ``reserve`` picks a place, in memory. ``write`` copies the payload there and computes
its checksum. ``commit`` syncs the extent files, and then writes record, inline payload, removals and use
times in one LMDB transaction. While one batch is committed, the next may be written.

**Why a crash does no harm.** A record exists only if its payload was on disk before it. A place is free only
when the transaction that removed its record is on disk, so no write ever overwrites a page whose record a
crash could bring back. The free space is not stored: it is what the records leave over, and is rebuilt at
open, so the two cannot disagree. If the disk lies about any of this, the checksum (and for the record its own
checksum, seeded with its serial) turns the damage into a miss. After a failed sync, ``commit`` refuses
everything written before it: the kernel reports lost writes once, and then forgets them (tier.py).

**How pages are read.** Each of several threads reads 1 to 4 MiB of neighbouring pages per request, and
computes the checksum while the bytes are in its cache. Small pages that are not adjacent are passed to the
kernel in one call (io.py), unless threads were clearly faster when the directory was created
(calibration.py).

**Damage and failure.** A page whose bytes are there but wrong is damaged and will never be read again. A disk
error says nothing about the pages: they stay (payloads.py). Every running call is tracked (io.py), so that a
disk that has stopped answering can be told from an idle one. ``probe`` finds out whether a failed disk works
again.

**Why the cap holds.** The sizes of the index map and of the extent space are fixed at open. With an allowance
for the rest, they add up to less than the cap (space.py). Neither file can grow past its share. When a
directory is opened with another cap, the policy evicts pages until the others fit. Pages outside of the slots
of the new space are moved, and then the extents are cut (fitting.py). An index file that is larger than its
new share is rewritten with the pages that the policy keeps (opening.py). The cap is also stored in the
directory, for fsck.

**What is read when.** Opening reads the index's facts (56 bytes a page) in the background, for free space and
the order of eviction (opening.py, page_table.py). Lookups do not wait for it. Facts have no checksum, so a
page's parent and place are taken from its record. After that, a record is read when a lookup needs it: a link
from (parent, key) leads to it. So a store of millions of pages opens at once and uses 84 bytes of memory for
each.

**Serials.** The index is keyed by serials, not by page keys: a parent's serial is always below its
children's, and two pages under one key are two pages. The root of each identity has a serial too
(roots.py).

**Encryption.** In an encrypted directory, records, links and payloads are in a *sealed* form (sealing.py)
that is a valid record, link and payload for everything that works without keys. The keys are elsewhere
(keyring.py).

**Rejected alternatives.** LMDB alone (values of 1 MiB are written at a fifth of the speed of extents).
One file per page (a directory entry, an inode and two syncs for each). Buffered
writes (a sixth of the speed of O_DIRECT here, and they evict other processes' pages from the page cache). A
free list on disk (one more structure to keep consistent, to save a second at open). LMDB's ``metasync=False``
(an acknowledged page could be lost). Growing LMDB's map while running (it races with readers).
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
