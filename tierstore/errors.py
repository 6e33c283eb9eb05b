"""The exceptions of tierstore. Every message says what was wrong and how to correct it.

A cache that is full, slow or dead is a *miss*, never an exception. Exceptions are for mistakes that a person
has to correct (bad arguments, a directory that cannot be used), and most are raised when a store, pool or
connection is opened.
"""

from __future__ import annotations


class TierStoreError(Exception):
    """Base class of all exceptions that this package raises on purpose."""


class UsageError(TierStoreError):
    """Invalid arguments, such as a text that is not a size, or a capacity below one page."""


class SpecError(UsageError):
    """A model configuration whose KV layout cannot be described."""


class StoreUnavailableError(TierStoreError):
    """The store directory cannot be used: not writable, in use, or written by another version."""


class SharedStoreError(StoreUnavailableError):
    """The shared store does not answer, or its answer is malformed."""


class StoreClosedError(TierStoreError):
    """A method was called on a store after ``close()``."""
