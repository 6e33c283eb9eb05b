"""``TIERSTORE=…`` and nothing else: vLLM's engines run over a store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.homes import Home, install_plug_ins, until
from tests.vllm import models
from tests.vllm.engines import ONE_THREAD, Ask, Engine
from tests.vllm.one_variable import RESULT
from tierstore_tools.vllm.asks import prompt
from tierstore_tools.vllm.engine import ENVIRONMENT

SETS = "tierstore: TIERSTORE sets --kv-transfer-config"


@pytest.fixture
def home(tmp_path, monkeypatch):
    found = Home()
    for name, value in (found.variables | {"PYTHONPATH": install_plug_ins(tmp_path / "installed")}).items():
        monkeypatch.setenv(name, value)
    yield found
    found.remove()


def test_an_engine_with_the_variable_hits_after_kill_9_of_everything(model, home: Home):
    folder, asked = model(models.LLAMA), Ask(prompt(900))
    environment = {"TIERSTORE": "auto"}
    engine = Engine(folder, processes=True, environment=environment)  # processes as of `vllm serve`
    [first] = engine.ask(asked).answers
    until(lambda: home.stats().store.pages == 14)  # saved behind the answer
    home.flush()
    engine.kill()
    home.kill()
    with Engine(folder, processes=True, environment=environment) as engine:
        answers = engine.ask(asked)
        for _ in range(5):
            if answers.external_hit_tokens:
                break
            assert engine.reset_prefix_cache()  # a lookup may be late on a busy machine, and is a miss then
            answers = engine.ask(asked)
        assert answers.external_hit_tokens == 896
        assert answers.answers[0].tokens == first.tokens
        assert home.stats().store.counters["saved_pages"] == 0  # all are from before the kill
        engine.close()
        assert engine.log.count(SETS) == 1  # the other processes have it from their parent
        assert len(re.findall("it (?:was started|is starting) as process", engine.log)) == 1
    assert home.daemons() == [home.stats().pid]


def configured(model: Path, *cases: tuple[dict[str, str], dict[str, object]]):
    """The connector of each case, and the lines about tierstore in the log. The first case's ``TIERSTORE`` is
    the one that the plug-in finds when vLLM loads it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.one_variable", str(model), json.dumps(cases)],
        env={**os.environ, **ENVIRONMENT, **ONE_THREAD, **cases[0][0]},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines() if "tierstore: " in line]  # where vLLM's log goes
    assert "tierstore: " not in done.stderr
    return json.loads(lines[0].removeprefix(RESULT)), [line.partition("tierstore: ")[2] for line in said]


def test_what_the_plug_in_sets_and_leaves(model, home: Home):
    url = "ipc:///nowhere/s"
    ours = ["TierStoreConnector", {"store": url}]
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    refusing = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found, said = configured(
        model(models.LLAMA),
        ({"TIERSTORE": url}, {}),
        ({}, {"flags": []}),
        ({}, {"flags": ["--kv-transfer-config", json.dumps(other)]}),
        ({"TIERSTORE": "on"}, {}),
        ({"TIERSTORE": url, **refusing}, {}),
    )
    assert found[:2] == [ours, ours]
    assert found[2][0] == "ExampleConnector"
    assert found[3:] == [None, None]
    assert [line.partition("'")[0].partition(":")[0] for line in said] == [
        "TIERSTORE sets --kv-transfer-config ",
        "TIERSTORE sets --kv-transfer-config ",
        "TIERSTORE is ignored, because --kv-transfer-config is given",
        "runs without the cache",
        "runs without the cache",
    ]
    assert "must be auto, off or the address of a daemon" in said[3]
    assert "vLLM refuses the connector: " in said[4]


@pytest.mark.parametrize("value", ["", "off"])
def test_without_the_variable_there_is_no_connector(model, home: Home, value):
    assert configured(model(models.LLAMA), ({"TIERSTORE": value}, {})) == ([None], [])
    assert not home.daemons()
