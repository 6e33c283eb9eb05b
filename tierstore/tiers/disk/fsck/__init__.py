"""fsck: is everything in a store's directory what it should be, and if not, make it so.

What is believed, in this order: a record is right when it matches its own checksum, a payload when it
matches its record's. Everything else in the index (facts, links, pieces) says again what records say, and a
page about which they disagree is damaged. A page stays when it is right, its place is a possible one that
no other page has, and all before it in its prompt stay. A repair removes what cannot stay; it makes nothing
again that can be computed again. ::

    check.py        the run, in order
    examination.py  all that the index holds, and whether its trees agree
    scrub.py        every payload, read and hashed at disk speed
    files.py        the directory and the extent files
    findings.py     what came of it

LMDB believes its file, and a damaged one can kill its reader. So the file is checked first
(index_file.py). What fails there is set aside as a whole.
"""

from tierstore.tiers.disk.fsck.check import CheckWatcher, fsck
from tierstore.tiers.disk.fsck.findings import Category, Finding, FsckReport, PageName

__all__ = ["Category", "CheckWatcher", "Finding", "FsckReport", "PageName", "fsck"]
