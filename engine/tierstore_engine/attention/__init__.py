"""Attention over paged KV: one interface, one backend per kind of device."""
