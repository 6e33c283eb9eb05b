"""tierstore-bench: measure each tier beside the machine's own limits."""
