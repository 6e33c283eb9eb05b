"""What tierstore raises at its boundary. Every message says what was wrong and what to do about it.

A cache that is full, slow or dead is a *miss*, never an exception: these are for mistakes that a
person has to mend (bad arguments, a directory that cannot be used), raised when a thing is opened.
"""

from __future__ import annotations


class TierStoreError(Exception):
    """Base of everything raised on purpose by this package."""


class UsageError(TierStoreError):
    """The arguments cannot work: a size that is not one, a capacity below one page."""


class SpecError(UsageError):
    """A model configuration whose KV layout cannot be described."""


class StoreUnavailableError(TierStoreError):
    """The store directory cannot be used: not writable, in use, or written by another version."""


class StoreClosedError(TierStoreError):
    """A verb was called on a store after ``close()``."""
