"""``tierstore-engine serve``: build the engine, run uvicorn, and shut down in order."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from tierstore.descriptors import raise_limit
from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore.units import format_size
from tierstore_connectors.common.handover import Role
from tierstore_engine.build import open_model_of
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import OpenModel
from tierstore_engine.opening import open_draft, open_engine
from tierstore_engine.options import ServeOptions
from tierstore_engine.pool_sizes import check_pool, pages_wanted, pool_bytes
from tierstore_engine.server.app import ApiServer
from tierstore_engine.server.chat import ChatTemplate, load_template
from tierstore_engine.server.defaults import OPENAI_DEFAULTS, SamplingDefaults, load_defaults
from tierstore_engine.server.http import listening_at, serve_app
from tierstore_engine.server.settings import NONE, ServerSettings

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_log = logging.getLogger(__name__)


def run(options: ServeOptions, server: ServerSettings, *, err: TextIO | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises :class:`~tierstore.errors.TierStoreError` with a one-line
    message.

    All checks that need neither weights nor a store are done before weights are read and a store is opened.
    """
    err = err or sys.stderr
    logging.basicConfig(level=logging.WARNING, format=_LOG_FORMAT, stream=err)
    raise_limit()
    settings, role = options.settings(), Role.parse(options.kv_role)
    server = replace(server, model_name=server.model_name or Path(options.model).name or options.model)
    opened = open_model_of(options)
    if any(each.name == server.model_name for each in opened.adapters):
        raise UsageError(f"--adapter {server.model_name} has the model's name: give it another one")
    template = load_template(opened.folder, server.chat_template, gguf=opened.gguf)
    defaults = OPENAI_DEFAULTS if server.generation_config == NONE else load_defaults(opened.folder)
    options.overflow_of(opened.device)  # this refuses options that do not fit together
    spec = opened.config.kv_spec(chunk_tokens=options.chunk_tokens)
    settings.check_chunk(spec.chunk_tokens)
    pages = _pool_pages(options, opened, spec)
    draft = open_draft(options, pages)
    with listening_at(server.host, server.port) as listening:
        engine = open_engine(
            options,
            opened,
            draft,
            pages=pages,
            settings=settings,
            most_pool_bytes=options.most_hbm_bytes,
            model_name=server.model_name,
            role=role,
        )
        try:
            asyncio.run(_serve(engine, server, template, defaults, listening, err))
        finally:
            engine.close()


async def _serve(
    engine: Engine,
    settings: ServerSettings,
    template: ChatTemplate | None,
    defaults: SamplingDefaults,
    listening: Sequence[socket.socket],
    err: TextIO,
) -> None:
    server = ApiServer(engine, settings, template, defaults)
    failed, loop = asyncio.Event(), asyncio.get_running_loop()
    server.engine.when_failed = lambda: loop.call_soon_threadsafe(failed.set)

    async def drain() -> None:
        if not await server.drain():
            _log.warning("requests were cut off: drain_s (%g) was not enough", settings.drain_s)

    try:
        announce = f"{settings.model_name} at"
        await serve_app(server.app, listening, drain=drain, announce=announce, err=err, failed=failed)
    finally:
        await asyncio.to_thread(server.close)
    if server.engine.failed is not None:
        raise server.engine.failed


def _pool_pages(options: ServeOptions, opened: OpenModel, spec: KVSpec) -> int | None:
    """Return the size of the pool in pages; None for a GPU's whole free memory."""
    settings = options.settings()
    pages = pages_wanted(options, opened.device, spec, settings)
    if pages is None:
        return None
    nbytes, most = pool_bytes(spec, pages, settings), options.most_hbm_bytes
    if most is not None:
        if most < nbytes:
            raise UsageError(
                f"--most-hbm-bytes ({format_size(most)}) is less than the initial page pool "
                f"({format_size(nbytes)}): raise it, or lower --hbm-bytes"
            )
        check_pool(spec, pages, opened.device, nbytes=most)
    _log.info("page pool of %s", format_size(nbytes))
    return pages
