"""The places that hold pages: they keep, and decide nothing."""
