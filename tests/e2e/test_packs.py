"""A prompt computed on one host is answered on another from a pack."""

from __future__ import annotations

import json
import random

import pytest

import tierstore
from tests.daemons import SPEC
from tests.tierstore.cli.commands import run
from tierstore.testing.processes import DaemonProcess

pytest.importorskip("torch")

from tierstore_engine.build import build_engine, load_model
from tierstore_engine.sampling import SamplingParams

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def hosts(tmp_path_factory):
    daemons = []
    for name in ("a", "b"):
        directory = tmp_path_factory.mktemp(name)
        directory.chmod(0o700)
        daemons.append(DaemonProcess(directory, host_bytes=64 << 20).start())
    for daemon in daemons:
        with tierstore.connect(daemon.url, SPEC) as store:
            assert store.wait_connected(30)  # an engine waits for less
    yield daemons
    for daemon in daemons:
        daemon.kill()


def test_the_receiving_engine_answers_as_the_sender(hosts, tmp_path):
    model = load_model("tiny", device="cpu")
    chance = random.Random(5)
    prompt = [chance.randrange(200) for _ in range(400)]

    def answer(url):
        engine = build_engine(model, pool_pages=32, store=url)
        try:
            [completion] = engine.generate([prompt], GREEDY)
        finally:
            engine.close()  # what it saves is below HBM then
        return completion

    sender = answer(hosts[0].url)
    assert not sum(sender.metrics.reused_by_tier.values())
    file, pack = tmp_path / "prompt.json", tmp_path / "a.tskv"
    file.write_text(json.dumps(prompt))
    code, _, err = run("pack", "export", pack, "--prompt-file", file, "--connect", hosts[0].url)
    assert (code, err) == (0, "")
    code, _, err = run("pack", "import", pack, "--connect", hosts[1].url)
    assert (code, err) == (0, "")
    receiver = answer(hosts[1].url)
    assert receiver.metrics.reused_by_tier == {"host": 384}  # six whole chunks
    assert receiver.tokens == sender.tokens
