"""A pack carries the pages of all layer groups: the receiving engine answers as the sender does."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierstore.cli import app
from tierstore_engine.build import build_engine, load_model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

CHUNK = 64
PROMPT = [3 + at * 7 % 250 for at in range(900)]


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-qwen3-next"])
def test_the_receivers_answer_is_the_senders(name: str, tmp_path: Path) -> None:
    model = load_model(name)
    spec = model.kv_spec(chunk_tokens=CHUNK)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)

    def answer(directory: Path, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
        engine = build_engine(
            model,
            pool_pages=64,
            store=str(directory),
            host_bytes=16 << 20,
            chunk_tokens=CHUNK,
            settings=EngineSettings(prefill_chunk=64, plan="load"),
        )
        with closing(engine):
            (result,) = engine.generate([prompt], params)
            return list(result.tokens), dict(result.metrics.reused_by_tier)

    sent, reused = answer(tmp_path / "a", PROMPT)
    assert reused == {}
    # Of the model that one of its groups names, all groups are packed.
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    chain = model.identity(spec).groups[0].digest.hex()
    asked = ["--prompt-file", str(tmp_path / "prompt.json"), "--identity", chain]
    run = CliRunner().invoke(
        app, ["pack", "export", str(tmp_path / "p.tskv"), *asked, "--store", str(tmp_path / "a")]
    )
    assert run.exit_code == 0, run.output

    run = CliRunner().invoke(
        app, ["pack", "import", str(tmp_path / "p.tskv"), "--store", str(tmp_path / "b")]
    )
    assert run.exit_code == 0, run.output
    assert run.output.count("all pages are in the store") == len(spec.groups)
    again, expected = answer(tmp_path / "a", PROMPT)
    received, found = answer(tmp_path / "b", PROMPT)
    assert sent == again == received
    assert found == expected
    assert found["disk"] >= 832
