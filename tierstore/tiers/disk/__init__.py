"""The disk tier: pages that outlive the process, in one directory with one owner and a fixed byte capacity.

::

    DIR                   locked (flock) by the owning process
    DIR/lock              the owner's process id
    DIR/index.lmdb        one record per page (index_db.py), and the payloads of small pages
    DIR/extents/000000 …  all other payloads, in one linear space of slots (extents.py, slabs.py)

**Where payloads are stored.** A payload of ``inline_bytes`` or less is in the index, in pieces of one LMDB
page each. All other payloads are in the extent files, which are preallocated. O_DIRECT transfers them between
the disk and the caller's memory.

**How a page is saved.** ``reserve`` chooses a place, without I/O. ``write`` copies the payload there and
computes its checksum. ``commit`` syncs the extent files, and then writes records, inline payloads, removals
and use times in one LMDB transaction. While one batch is committed, the next batch may be written.

**Why a crash does no harm.** A payload is on disk before its record is written. A place becomes free only
when the transaction that removed its record is on disk. So no write overwrites a page whose record a crash
could restore. The free space is not stored: each opening computes it from the records, so it cannot
contradict them. If the disk loses a write that it has reported as done, the checksums of payload and record
do not match, and the page is a miss. After a failed sync, ``commit`` refuses all pages written before it,
because the kernel reports a lost write only once (tier.py).

**How pages are read.** Several threads read 1 to 4 MiB of adjacent pages per request. Each computes the
checksum while the bytes are in its core's cache. Small pages that are not adjacent are passed to the kernel
in one call (io.py), unless threads were clearly faster when the directory was created (calibration.py).

**Damage and failure.** A page whose bytes have changed is damaged and will never be read again. After an
error of the disk, pages stay, because the error does not mean that they are damaged (payloads.py). Every
running call is tracked (io.py), to distinguish a disk that has stopped responding from an idle disk.
``probe`` finds out whether a failed disk works again.

**Why the capacity holds.** The sizes of the index map and of the extent space are fixed at open. Together
with an allowance for other files, they are less than the capacity (space.py). When a directory is opened with
another capacity, the policy evicts pages until the remaining pages fit. Pages outside of the slots of the new
extent space are moved, and then the extent files are truncated (fitting.py). An index file that is larger
than its new share is rewritten with the pages that the policy keeps (opening.py). The capacity is also stored
in the directory, for fsck.

**What is read at open.** A background thread reads the index's facts (56 bytes a page), for the free space
and the order of eviction (opening.py, page_table.py). Lookups do not wait for this thread. Facts have no
checksum, so a page's parent and place are taken from its record. Later, a record is read when a lookup needs
it: a link from (parent, key) leads to it. So a store of millions of pages can be used at once, and needs 84
bytes of memory per page.

**Serials.** Pages and the roots of identities (roots.py) are numbered by serials. A parent's serial is always
lower than those of its children. Two pages with the same key have different serials.

**Encryption.** In an encrypted directory, records, links and payloads have a *sealed* form (sealing.py). Code
that needs no key handles sealed and plain records, links and payloads in the same way. The keys are in a file
outside of the directory (keyring.py).

**Rejected alternatives.** LMDB for all payloads (values of 1 MiB are written at a fifth of the speed of
extents). One file per page (a directory entry, an inode and two syncs for each). Buffered writes (a sixth of
the speed of O_DIRECT in a measurement, and they evict other processes' pages from the page cache). A free
list on disk (one more structure to keep consistent, to save a second at open). LMDB's ``metasync=False`` (a
page could be lost after ``commit`` has returned). Growing LMDB's map while the store runs (a race with
readers)."""

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
