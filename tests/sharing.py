"""Engines that share pages: the bundled engine beside another one, and what they have of a prompt."""

from __future__ import annotations

import contextlib

import numpy as np

import tierstore
from tests.portions import chosen
from tests.vllm import models
from tierstore.spec import KVSpec
from tierstore_connectors.common.sharing import shared_identity

CHUNK = 64
LONG, SHORT = 4_096, 1_024  # tokens that are shared
MODELS = chosen(
    [
        (models.LLAMA, LONG),
        (models.LLAMA3, SHORT),
        (models.QWEN2, SHORT),
        (models.QWEN3, SHORT),
        (models.GEMMA, LONG),
    ],
    (models.LLAMA, LONG),
    (models.GEMMA, LONG),
)
"""Kinds of models, each with a number of tokens."""
GROUPS = dict.fromkeys((models.LLAMA, models.LLAMA3, models.QWEN2, models.QWEN3), 1) | {models.GEMMA: 2}
"""The layer groups of each kind of model."""
SAME_LOGITS = 1e-4  # float32
SAME_KV = 1e-3


@contextlib.contextmanager
def bundled(folder, store=None, *, share=True, whole_windows=False):
    """The bundled engine, over a daemon or with pages of its own pool only."""
    from tierstore_engine.build import build_engine, load_model
    from tierstore_engine.settings import EngineSettings

    engine = build_engine(
        load_model(str(folder), device="cpu"),
        pool_pages=300,
        store=store,
        chunk_tokens=CHUNK,
        settings=EngineSettings(plan="load", whole_windows=whole_windows),
        share_engines=share,
    )
    try:
        yield engine
    finally:
        engine.close()


def answer(engine, tokens):
    """The bundled engine's answer, with logits."""
    from tierstore_engine.sampling import SamplingParams

    [completion] = engine.generate(
        [tokens], SamplingParams(max_new_tokens=8, keep_logits=True, ignore_eos=True)
    )
    return completion


def own_pages(engine, tokens):
    """The KV that the bundled engine has of these tokens, one page per group and chunk, as bytes."""
    store = engine.connector.store
    hit = store.lookup(tokens)
    assert hit.tokens // CHUNK == len(tokens) // CHUNK
    loaded = store.load(hit).wait()
    found = []
    for group, kept in enumerate(loaded.groups or [loaded]):
        pool = store.pools[group]
        pages = np.zeros((len(tokens) // CHUNK, pool.spec.page_bytes), np.uint8)
        numbers = list(kept.pages)[-len(pages) :]
        targets = [(number, page.ctypes.data) for number, page in zip(numbers, pages, strict=False)]
        pool.read_pages(targets)
        found.append(pages[: len(targets)])
        store.release_hbm(kept.pages, group=group)
    return found


def stored_pages(url, folder, tokens):
    """The KV of these tokens that the daemon has from any engine."""
    identity = shared_identity(folder, dtype="float32", chunk_tokens=CHUNK)
    spec = KVSpec.parse(identity.layout)
    with tierstore.connect(url, spec, identity=identity) as store:
        hit = store.lookup(tokens)
        assert hit.tokens == len(tokens) // CHUNK * CHUNK
        into = [[bytearray(group.page_bytes) for _ in hit.chunks(group.number)] for group in store.groups]
        assert store.load(hit, into if len(into) > 1 else into[0]).wait().tokens == hit.tokens
    return [np.frombuffer(b"".join(pages), np.uint8).reshape(len(pages), -1) for pages in into]


def kv_difference(one, other):
    """The greatest difference between two sets of pages in float32."""
    greatest = 0.0
    for mine, theirs in zip(one, other, strict=True):
        last = min(len(mine), len(theirs))
        mine, theirs = mine[-last:].view(np.float32), theirs[-last:].view(np.float32)
        greatest = max(greatest, float(np.abs(mine - theirs).max()))
    return greatest
