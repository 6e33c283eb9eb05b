"""Campaigns that prove the store's durability: they damage stores in every way that is implemented here, and
count wrong pages, lost pages, and bytes over the cap. ``tierstore-bench faults`` runs them from a checkout.

Three ways to damage a store, all below the code that users run::

    record a script ──▶ journal ──▶ every crash ──▶ files after it ─┐
    record a script ──▶ files at rest ──▶ damaged files ────────────┼─▶ open, ask for everything,
    play a script over calls that fail, lie or hang ────────────────┤   compare every byte  (verdict.py)
    kill -9 a process that writes ──────────────────────────────────┘

**The disk that crash images are made of** (``disk.py``). A disk has a volatile cache. What is written to a
file is *pending* until a sync of that file has returned that began after it; so are changes of its size.
Names of files (made, removed, renamed) are pending until their directory was synced. When the power fails,
any subset of the pending changes is on the disk, in any order, and of the write under way any subset of its
512-byte sectors: before them lies what was there before. This is what POSIX leaves open, and more than ext4
or xfs would do (they never forget the name of a file that was synced).

LMDB writes its own file, past the disk tier's I/O object, and always in the same way: the changed pages go
to places that nothing refers to, a sync, then one meta page that is written through. It fits into one sector
and is whole or not there. So each transaction is recorded as the file before and the file after it
(``recording.py``), and while it is under way the disk has the old meta page and any of the changed
sectors. That LMDB is opened in the mode in which this is true is checked.

**What must hold afterwards** (``recording.py``, ``verdict.py``). A page is *acknowledged* when the store was
flushed, its host tier emptied, and a lookup still finds it. After a crash in the middle of a step must be
there what was acknowledged before the step and would be there after it. What is served must be byte for byte
what was saved, which needs no memory of the run: page bytes tell whose they are. And what a lookup finds must
also load, or there was a record without its page. The directory may never take more than its cap.

**What is left out.** Disks that lie about a sync: no order of writes survives that, and what is promised
then is only that nothing wrong is served (the damages show it). Sectors that are half written (disks protect
them by a code: a torn one is an unreadable one). The directory ``extents`` itself is always there. Damage to
LMDB's tree pages other than in records and payloads: LMDB does not checksum them. Crashes within a crash's
recovery are had by crashing the scripts' own reopenings, not by going on from images.

Everything is seeded; a trial that fails says what it did in one line (:meth:`campaign.Trial.describe`).
"""
