"""fsck: is everything in a store's directory what it should be, and if not, make it so.

What is believed, in this order: a record is right when it matches its own checksum, a payload when it matches
its record's. Everything else in the index (facts, links, pieces) says again what records say and is compared
with them. A page stays when it is right, its place is a possible one that no other page has, and all before
it in its prompt stay. ::

    check.py        the run, in order
    inventory.py    all that the index holds, as arrays
    examination.py  do its trees agree?                            (pure)
    places.py       do pages lie where pages can lie?              (pure)
    scrub.py        every payload, read and hashed at disk speed
    files.py        the directory and the extent files
    room.py         what gives way to a new index under the cap
    repair.py       the index, mended
    findings.py     what came of it

LMDB believes its file, and a damaged one can kill whoever reads it. So another process reads all of it first.
"""

from tierstore.tiers.disk.fsck.check import Watcher, fsck
from tierstore.tiers.disk.fsck.findings import Category, Finding, FsckReport, PageName

__all__ = ["Category", "Finding", "FsckReport", "PageName", "Watcher", "fsck"]
