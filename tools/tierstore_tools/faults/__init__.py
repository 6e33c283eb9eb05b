"""``tierstore-bench faults``: hurts stores in every way that ``tierstore.testing.faults`` knows, and counts
wrong pages, lost pages, and bytes beyond the cap."""
