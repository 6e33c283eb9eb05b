"""``tierstore-bench replay``: the store's own policy code over traces of real requests."""
