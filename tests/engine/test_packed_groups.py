"""A pack carries the pages of all layer groups: the receiving engine answers as the sender does."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tierstore
from tierstore.cli import app
from tierstore.errors import UsageError
from tierstore.packs import export_pack
from tierstore_engine.build import build_engine, load_model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

CHUNK = 64
PROMPT = [3 + at * 7 % 250 for at in range(900)]


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-qwen3-next"])
def test_the_receivers_answer_is_the_senders(name: str, tmp_path: Path) -> None:
    model = load_model(name)
    spec = model.kv_spec(chunk_tokens=CHUNK)
    identity = model.identity(spec)
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
    with tierstore.open(tmp_path / "a", spec, identity=identity, host_bytes=16 << 20) as store:
        asyncio.run(export_pack(store, [store.prompt(PROMPT)], tmp_path / "p.tskv"))

    # Its chain by itself would give no hits.
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    chain = identity.groups[0].digest.hex()
    asked = ["--prompt-file", str(tmp_path / "prompt.json"), "--identity", chain]
    run = CliRunner().invoke(app, ["pack", "export", "x.tskv", *asked, "--store", str(tmp_path / "a")])
    assert isinstance(run.exception, UsageError)
    assert "several layer groups" in str(run.exception)

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
