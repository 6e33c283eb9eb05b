"""A request names its adapter as its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs pip install -e '.[dev]'")
pytest.importorskip("uvicorn")

from tests.engine.adapters import write_adapter
from tests.tiny_models import reference_model
from tierstore_engine.adapters import read_adapters
from tierstore_engine.build import build_engine
from tierstore_engine.loaded import LoadedModel

from .live import Live


@pytest.fixture
def live(
    tmp_path: Path,
    checkpoints: Callable[..., Path],
    loaded: Callable[..., LoadedModel],
    serve: Callable[..., Live],
) -> Live:
    folder = write_adapter(tmp_path / "a", reference_model("llama3"), ("q_proj", "v_proj", "o_proj"), seed=1)
    model = loaded(str(checkpoints("llama3")))
    model = replace(model, adapters=read_adapters(model.config, [f"polite={folder}"]))
    return serve(build_engine(model, pool_pages=64, chunk_tokens=16))


def answer(live: Live, model: str, **fields: Any) -> Any:
    prompt = "the cat sat on the mat and the dog lay on the log " * 2
    return live.client.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=12, extra_body={"ignore_eos": True, **fields}
    )


def test_models_lists_adapters(live: Live) -> None:
    listed = live.http.get("/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [("tiny", None), ("polite", "tiny")]
    assert live.client.models.retrieve("polite").id == "polite"
    with pytest.raises(openai.NotFoundError, match="'tiny', 'polite' are"):
        live.client.models.retrieve("rude")


def test_a_request_names_its_adapter(live: Live) -> None:
    plain, polite = answer(live, "tiny"), answer(live, "polite")
    assert (plain.model, polite.model) == ("tiny", "polite")
    assert plain.choices[0].text != polite.choices[0].text
    assert polite.usage.prompt_tokens_details.cached_tokens == 0
    assert answer(live, "polite").usage.prompt_tokens_details.cached_tokens > 0


def test_reasons_are_those_of_the_adapters_pages(live: Live) -> None:
    answer(live, "tiny")
    first = answer(live, "polite", explain_cache=True)
    again = answer(live, "polite", explain_cache=True)
    details = [each.usage.prompt_tokens_details.model_dump() for each in (first, again)]
    assert details[0]["cached_tokens"] == 0 < details[1]["cached_tokens"]


def test_prompts_of_another_model_are_not_compared(live: Live) -> None:
    first = answer(live, "tiny")
    options = {"prompt_cache_options": {"comparison_response_id": first.id}}
    same, other = (answer(live, name, **options).prompt_cache_diagnostics for name in ("tiny", "polite"))
    assert same["type"] != other["type"] == "comparison_response_not_found"
