"""Open the engine that a command's options describe, with its draft model."""

from __future__ import annotations

from typing import Any

from tierstore.errors import TierStoreError, UsageError
from tierstore_engine.build import build_draft_model, build_engine, check_draft, load_model, open_model
from tierstore_engine.drafting import Drafter, PromptLookupDrafter
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import OpenModel
from tierstore_engine.options import MTP, EngineOptions
from tierstore_engine.pool_sizes import draft_pages
from tierstore_engine.settings import EngineSettings

_PROMPT_LOOKUP = "prompt-lookup"


def open_draft(options: EngineOptions, pages: int | None) -> OpenModel | None:
    """Return the draft model, if the drafter is a model. ``pages`` is the size of the engine's pool.

    Raises :class:`UsageError` if the pool has no size, and the errors of
    :func:`~tierstore_engine.build.open_model`.
    """
    if options.draft in (None, _PROMPT_LOOKUP, MTP):
        return None
    if pages is None:
        raise UsageError("a draft model needs memory beside the model's pages: give --hbm-bytes")
    return open_model(options.draft, device=options.device, **options.reading())


def open_engine(
    options: EngineOptions,
    opened: OpenModel,
    draft: OpenModel | None,
    *,
    pages: int | None,
    settings: EngineSettings,
    **arguments: Any,
) -> Engine:
    """Read the weights of ``opened`` and ``draft`` and return the engine. ``arguments`` are further arguments
    of :func:`~tierstore_engine.build.build_engine`, whose errors it raises."""
    if draft is not None:
        check_draft(draft.config, opened.config)
    model = load_model(opened)
    drafter: Drafter | None = None
    if options.draft == _PROMPT_LOOKUP:
        drafter = PromptLookupDrafter(tokens=options.most_drafted)
    elif draft is not None and pages is not None:
        drafter = build_draft_model(
            load_model(draft),
            model,
            pool_pages=draft_pages(draft.config, opened.config, pages, settings),
            tokens=options.most_drafted,
            settings=settings,
            **options.keeping(),
        )
    try:
        return build_engine(
            model,
            pool_pages=pages,
            overflow=options.overflow_of(opened.device),
            settings=settings,
            drafter=drafter,
            share_engines=options.share_engines,
            predicted_tokens=options.most_drafted,
            **arguments,
            **options.keeping(),
        )
    except TierStoreError:
        if drafter is not None:
            drafter.close()
        raise
