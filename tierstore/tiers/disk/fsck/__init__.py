"""fsck: check everything in a store's directory, and repair it if requested.

The check believes a record that matches its own checksum, and a payload that matches its record's checksum.
All other parts of the index (facts, links, pieces) repeat what records say. If they disagree about a page,
the page is damaged. A page stays when it is right, its place is possible and not another page's, and all
pages before it in its prompt stay. A repair removes what cannot stay. It does not rebuild pages, which can be
computed again. ::

    check.py        the run, in order
    examination.py  the contents of the index, and whether its trees agree
    scrub.py        every payload, read and hashed at disk speed
    files.py        the directory and the extent files
    findings.py     the results

LMDB trusts its file, and a damaged one can crash its reader. So the file is checked first (index_file.py).
If that check fails, the whole file is set aside.
"""

from tierstore.tiers.disk.fsck.check import CheckWatcher, fsck
from tierstore.tiers.disk.fsck.findings import Category, Finding, FsckReport, PageName

__all__ = ["Category", "CheckWatcher", "Finding", "FsckReport", "PageName", "fsck"]
