"""Prompts with images: the pixels count, whatever a client calls them, and how they are made. For KV, and for
the embeddings that the encoder has made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.vllm import models
from tests.vllm.engines import ONE_THREAD
from tests.vllm.harness import patient, wait_stored
from tierstore_tools.vllm.engine import ENVIRONMENT

ALIGNED = 704  # of 16 tokens of the image and 700 of text


class Engine:
    """An engine of its own (``images.py``). ``found`` is what it found of each ask: the tokens, the images
    encoded so far, the answer's token and its log-probability."""

    def __init__(self, model, asks, **options):
        self.process = subprocess.Popen(
            [*(sys.executable, "-m", "tests.vllm.images", str(model)), *map(json.dumps, (options, asks))],
            env={**ENVIRONMENT, **ONE_THREAD, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log, self.found = [], []
        for line in self.process.stdout:
            self.log.append(line)
            if line.startswith("found "):
                self.found.append(json.loads(line.removeprefix("found ")))
            if len(self.found) == len(asks):
                return
        raise AssertionError("".join(self.log)[-4000:])

    def end(self):
        log, _ = self.process.communicate(timeout=120)
        assert not self.process.returncode, log[-4000:]

    def kill(self):
        self.process.kill()
        self.process.communicate(timeout=120)


def ask(model, daemon, asks, **options):
    """How many tokens an engine of its own finds of each ask."""
    engine = Engine(model, asks, kv_transfer_config=patient(daemon.url), **options)
    engine.end()
    return [tokens for tokens, *_ in engine.found]


def test_images_are_told_apart_by_their_pixels(model, daemon):
    place = model(models.LLAVA)
    # A name that a client gives to two images: what vLLM then computes with is its affair, and is not stored.
    first = [[10, "a", None], [10, "a", ALIGNED], [200, "a", None], [200, "a", None], [10, None, ALIGNED]]
    assert ask(place, daemon, first, mm_processor_cache_gb=0) == [0, ALIGNED, 0, 0, ALIGNED]
    # In another life of the engine the name stands for the other image.
    second = [[200, "a", None], [200, "a", ALIGNED], [10, "another name", ALIGNED], [90, "another", None]]
    assert ask(place, daemon, second) == [0, ALIGNED, ALIGNED, 0]


def test_other_processors_make_other_pages(model, daemon, tmp_path):
    place = model(models.LLAVA)
    assert ask(place, daemon, [[10, None, None], [10, None, ALIGNED]]) == [0, ALIGNED]
    assert ask(place, daemon, [[10, None, None]], mm_processor_kwargs={"do_normalize": False}) == [0]
    edited = tmp_path / "edited"
    shutil.copytree(place, edited)
    config = json.loads((edited / "processor_config.json").read_text())
    (edited / "processor_config.json").write_text(json.dumps({**config, "chat_template": "x"}))
    assert ask(edited, daemon, [[10, None, None]]) == [0]


def embeddings(daemon, role="ec_both"):
    return {
        "ec_connector": "TierStoreECConnector",
        "ec_connector_module_path": "tierstore_connectors.vllm",
        "ec_role": role,
        "ec_connector_extra_config": {"store": daemon.url, "lookup_s": 20.0, "load_s": 60.0},
    }


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (models.LLAVA, [{"do_normalize": False}]),
        # The second makes the same of these images, but not of all.
        (models.QWEN2_VL, [{"max_pixels": 56 * 56}, {"min_pixels": 112 * 112}]),
        (models.QWEN2_AUDIO, [{"do_normalize": True}]),
    ],
)
def test_no_input_is_encoded_again_after_kill_9_of_everything(model, daemon, kind, others):
    """By no other engine and in no later life, with the same answers. By another processor it is."""
    place, asks = model(kind), [[10, None, None], [200, "a", None], [10, "b", None]]
    alone = Engine(place, asks)
    alone.end()
    first = Engine(place, asks, ec_transfer_config=embeddings(daemon))
    wait_stored(daemon, 2)
    daemon.wait_written()
    first.kill()
    daemon.kill()
    daemon.start()
    second = Engine(place, asks, ec_transfer_config=embeddings(daemon))
    second.end()
    assert [encoded for _, encoded, *_ in alone.found] == [1, 2, 3]
    assert [encoded for _, encoded, *_ in second.found] == [0, 0, 0], "".join(second.log)[-4000:]
    answers = [[found[2:] for found in engine.found] for engine in (alone, first, second)]
    assert answers[0] == answers[1] == answers[2], "bit for bit"
    assert answers[0][0] != answers[0][1]
    for other in others:
        third = Engine(place, asks[:1], ec_transfer_config=embeddings(daemon), mm_processor_kwargs=other)
        third.end()
        assert third.found[0][1] == 1


def test_an_engine_that_only_encodes_works_for_another(model, daemon):
    place, asks = model(models.LLAVA), [[10, None, None], [200, None, None]]
    for _ in range(2):  # the second time the store has them
        producer = Engine(place, asks, ec_transfer_config=embeddings(daemon, "ec_producer"))
        producer.end()
    consumer = Engine(place, asks, ec_transfer_config=embeddings(daemon, "ec_consumer"))
    consumer.end()
    assert [encoded for _, encoded, *_ in producer.found] == [0, 0]
    assert [encoded for _, encoded, *_ in consumer.found] == [0, 0], "".join(consumer.log)[-4000:]
    assert consumer.found[0][2:] != consumer.found[1][2:]
