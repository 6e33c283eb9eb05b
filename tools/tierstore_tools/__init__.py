"""tierstore-bench: what each tier is worth, measured beside the machine's own limits."""
