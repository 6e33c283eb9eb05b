"""For whoever writes a connector, a tier or a test: a clock moved by hand, page bytes that tell whose they
are."""
