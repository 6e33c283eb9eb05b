"""The index's trees by their names, and the keys in them. Nothing of LMDB is here."""

from __future__ import annotations

from tierstore.tiers.disk.records import PageRecord

TREES = (b"meta", b"roots", b"pages", b"facts", b"children", b"payload")
FORMAT_KEY = b"format"
NEXT_SERIAL = b"next_serial"
TICK = b"tick"
PIECE_BYTES = 4096 - 16  # what one LMDB overflow page holds
BEGINNING = 16  # bytes of a chunk, four tokens, that its siblings are sorted by


def page_key(serial: int) -> bytes:
    """Of a page's record and facts, and of a root."""
    return serial.to_bytes(8, "big")


def payload_key(serial: int, piece: int) -> bytes:
    """Of one piece of a payload that is in the index."""
    return serial.to_bytes(8, "big") + piece.to_bytes(4, "big")


def child_prefix(parent: int, tokens: bytes) -> bytes:
    """What the links to all children of ``parent`` that begin like ``tokens`` have in common."""
    return parent.to_bytes(8, "big") + tokens[:BEGINNING].ljust(BEGINNING, b"\0")


def link_of(record: PageRecord) -> bytes:
    """The key in ``children`` that leads to a page."""
    return child_prefix(record.parent, record.tokens) + record.key + page_key(record.serial)
