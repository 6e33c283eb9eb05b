"""A cache for transformers models, with pages in a tierstore (docs/transformers.md)."""

from __future__ import annotations

from tierstore_connectors.transformers.cache import TierStoreCache

__all__ = ["TierStoreCache"]
