"""fsck: check everything in a store's directory, and repair it if requested.

The check trusts a record that matches its own checksum, and a payload that matches its record's checksum. All
other parts of the index (facts, links, pieces) repeat the contents of records. If these parts contradict a
page's record, the page is damaged. A page stays if it is not damaged, its place is possible and not another
page's, and all pages before it in its prompt stay. A repair removes all other pages. A repair does not
rebuild pages, because they can be computed again. ::

    check.py        runs the steps of a check in order
    examination.py  reads the index, and compares its trees
    scrub.py        reads and verifies every payload, at disk speed
    files.py        checks the directory and the extent files
    findings.py     the results

LMDB does not check its file, and a damaged file can crash its reader. So index_file.py checks the file first.
If that check fails, a repair renames the file and creates an empty index.
"""

from tierstore.tiers.disk.fsck.check import CheckWatcher, fsck
from tierstore.tiers.disk.fsck.findings import Category, Finding, FsckReport, PageName

__all__ = ["Category", "CheckWatcher", "Finding", "FsckReport", "PageName", "fsck"]
