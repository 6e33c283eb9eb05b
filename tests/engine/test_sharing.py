"""The bundled engine keeps pages that other engines share, and refuses where they cannot."""

from __future__ import annotations

import pytest

import tierstore
from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore_connectors.common.sharing import shared_identity
from tierstore_engine.build import build_engine, load_model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

CHUNK = 16


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    """Where digests of files are remembered: not in the cache of who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def engine_over(model, url, *, share=True):
    settings = EngineSettings(prefill_chunk=64, plan="load")
    return build_engine(
        model, pool_pages=32, store=url, chunk_tokens=CHUNK, settings=settings, share_engines=share
    )


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_pages_are_found_under_the_models_identity(checkpoints, loaded, shared_daemon, name):
    folder = checkpoints(name)
    model = loaded(str(folder))
    prompt = list(range(5, 5 + 4 * CHUNK + 3))
    engine = engine_over(model, shared_daemon.url)
    [first] = engine.generate([prompt], SamplingParams(max_new_tokens=2, ignore_eos=True))
    engine.close()
    shared = shared_identity(folder, dtype=model.config.dtype, chunk_tokens=CHUNK)
    with tierstore.connect(shared_daemon.url, KVSpec.parse(shared.layout), identity=shared) as store:
        assert store.lookup(prompt).tokens >= 4 * CHUNK
    again = engine_over(model, shared_daemon.url)
    [second] = again.generate([prompt], SamplingParams(max_new_tokens=2, ignore_eos=True))
    again.close()
    assert second.metrics.reused_tokens >= 4 * CHUNK
    assert second.tokens == first.tokens
    own = engine_over(model, shared_daemon.url, share=False)
    [third] = own.generate([prompt], SamplingParams(max_new_tokens=2, ignore_eos=True))
    own.close()
    assert third.metrics.reused_tokens == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "int8"}, "a KV of --kv-dtype is this engine's own"),
        ({"deterministic": True}, "--deterministic needs pages that this engine has computed itself"),
    ],
    ids=str,
)
def test_what_is_the_engines_own_is_not_shared(checkpoints, options, message):
    model = load_model(str(checkpoints("llama3")), device="cpu", **options)
    with pytest.raises(UsageError, match=f"share_engines: {message}"):
        engine_over(model, None)


def test_models_without_a_folder_or_a_measurement_are_not_shared(checkpoints, loaded, tiny):
    with pytest.raises(UsageError, match="share_engines: the model needs a local folder"):
        engine_over(tiny, None)
    with pytest.raises(UsageError, match="share_engines: pages of model_type 'mixtral' are not shared"):
        engine_over(loaded(str(checkpoints("mixtral"))), None)
