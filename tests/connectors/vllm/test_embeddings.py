"""Both halves of the connector for embeddings over a real daemon, with requests and an encoder of our own."""

from __future__ import annotations

import itertools
import logging
import pickle
import random
import signal
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from tests.connectors.vllm.test_small_parts import feature
from tests.portions import portion
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.testing.clock import wait_until
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.vllm.config import EncoderSettings
from tierstore_connectors.vllm.embeddings import (
    EmbeddingKey,
    EncoderScheduler,
    EncoderWorker,
    embedding_of,
    pages_of,
)

WIDTH, ROWS = 32, 100
_models = itertools.count()


@dataclass
class Request:
    """As much of vLLM's request as the connector looks at: a prompt of images, one after the other."""

    request_id: str
    mm_features: list
    lora_request: object = None

    def get_num_encoder_embeds(self, at):
        return self.mm_features[at].mm_position.length


def image(pixels, name=None, rows=ROWS, offset=0):
    found = feature(name or f"image {pixels}", {"pixels": [pixels]}, offset)
    found.mm_position = SimpleNamespace(offset=offset, length=rows)
    return found


def request(*images):
    return Request(str(next(_models)), list(images))


def encoded(feature):
    """What the encoder makes of an image."""
    generator = torch.Generator().manual_seed(int(feature.data["pixels"].data[0]))
    return torch.randn((feature.mm_position.length, WIDTH), generator=generator).to(torch.bfloat16)


class Engine:
    """As much of vLLM as decides about encoders: its encoder cache, and a request after the other."""

    def __init__(self, url, model, *, loads=True, saves=True, **options):
        settings = EncoderSettings(store=url, **{"lookup_s": 10.0, "load_s": 10.0, **options})
        spec = KVSpec.embedding(width=WIDTH, dtype="bfloat16")
        identity = Identity.of(spec, model=model, codec="vllm-encoder")
        self.errors, self.counters = ErrorLog(logging.getLogger("vllm.tierstore")), ConnectorCounters()
        self.scheduler = EncoderScheduler(
            settings, lambda modality: identity, self.errors, self.counters, loads=loads, saves=saves
        )
        self.worker = EncoderWorker(settings, self.errors, self.counters, saves=saves)
        self.encoder_cache = {}
        self.encoded = 0

    def run(self, *requests, free=()):
        """Compute these requests in one step, as soon as each can start. Return their embeddings."""
        while not min([self.scheduler.ready(each, 0) for each in requests], default=True):
            self.scheduler.work(SimpleNamespace(free_encoder_mm_hashes=[], total_num_scheduled_tokens=0))
        compute, seen = [], set(self.encoder_cache) - set(free)
        for each in requests:
            for at, found in enumerate(each.mm_features):
                if found.identifier not in seen:
                    seen.add(found.identifier)
                    if not self.scheduler.has(found.identifier):
                        compute.append(found)
                    self.scheduler.allocated(each, at)
        work = self.scheduler.work(
            SimpleNamespace(free_encoder_mm_hashes=list(free), total_num_scheduled_tokens=1)
        )
        for name in free:
            self.encoder_cache.pop(name, None)
        work = pickle.loads(pickle.dumps(work))  # to workers in other processes
        self.worker.load(work, self.encoder_cache, "cpu")
        for found in compute:
            self.encoded += 1
            self.encoder_cache[found.identifier] = encoded(found)
            self.worker.save(work, self.encoder_cache, found.identifier)
        for each in requests:
            self.scheduler.finished(each)
        return [[self.encoder_cache[found.identifier] for found in each.mm_features] for each in requests]

    def settle(self):
        self.worker.wait_saved(30.0)

    def close(self):
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def engine(shared_daemon):
    """``engine(model=…)``: engines of one model by default, which nobody else has."""
    own, engines = f"encoder {next(_models)}", []

    def make(*, url=None, model=own, **options):
        engines.append(Engine(url or shared_daemon.url, model, **options))
        if url is None:
            engines[-1].scheduler.connect(["image"])
            [store] = engines[-1].scheduler._stores._stores.values()
            assert store._store.wait_connected(30)
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def right(found, *images):
    return all(torch.equal(mine, encoded(theirs)) for mine, theirs in zip(found, images, strict=True))


def test_another_engine_does_not_encode_again(engine):
    first, images = engine(), [image(1), image(2, rows=64, offset=100), image(3, rows=1, offset=200)]
    assert right(*first.run(request(*images)), *images)
    first.settle()
    second = engine()
    assert right(*second.run(request(*images)), *images)
    assert (first.encoded, second.encoded) == (3, 0)
    assert second.counters.take() == {"lookups": 3, "found": 3, "loaded_bytes": 165 * WIDTH * 2}
    assert not first.errors.counts + second.errors.counts


def test_a_client_s_name_finds_nothing(engine):
    """Neither another image under the same name, nor the same image of another processor or with other
    rows; the same image under another name is found."""
    first = engine()
    first.run(request(image(1, "a")))
    first.settle()
    for other, encodes in [(image(2, "a"), 1), (image(1, "a", rows=99), 1), (image(1, "b"), 0)]:
        second = engine()
        assert right(*second.run(request(other)), other)
        assert second.encoded == encodes
    other_processor = engine(model=f"encoder {next(_models)}")
    other_processor.run(request(image(1, "a")))
    assert other_processor.encoded == 1


def test_a_name_that_stands_for_two_images_goes_without_the_store(engine):
    first, second = engine(), engine()
    first.run(request(image(1, "a")))
    first.settle()
    both = [request(image(1, "a")), request(image(2, "a"))]
    second.run(*both)  # both in one step: vLLM computes one of them under that name
    assert second.encoded == 1
    assert second.errors.counts["media"]
    second.settle()
    third, images = engine(), [image(1, "b"), image(2, "c")]
    assert right(*third.run(request(*images)), *images)


def test_an_image_in_vllms_own_cache_is_not_looked_up(engine):
    one = engine()
    one.run(request(image(1)))
    one.run(request(image(1)))
    assert one.counters.take()["lookups"] == 1
    one.settle()
    one.run(request(image(2)), free=["image 1"])
    one.run(request(image(1)))
    assert one.encoded == 2, "it comes back from the store"


def test_what_lies_before_a_cached_prefix_is_not_looked_up(engine):
    one = engine()
    assert one.scheduler.ready(request(image(1), image(2, offset=100)), 200)
    assert one.counters.take() == {}


def test_an_aborted_request_leaves_nothing(engine):
    one, asked = engine(), request(image(0), image(1, offset=100))
    one.scheduler.ready(asked, 100)  # the first image is in a cached prefix
    one.scheduler.finished(asked)
    assert one.scheduler._inputs == one.scheduler._keys == {}
    one.run(asked)
    assert one.encoded == 2


def test_roles(engine):
    """A producer does not encode what the store has, and loads nothing. A consumer saves nothing."""
    consumer, producer, images = engine(saves=False), engine(loads=False), [image(5)]
    consumer.run(request(*images))
    producer.run(request(*images))
    assert (consumer.encoded, producer.encoded) == (1, 1)
    producer.settle()
    again, reader = engine(loads=False), engine(saves=False)
    again.scheduler.ready(request(*images), 0)
    known = again.scheduler._inputs["image 5"]
    assert known.answer.result(30).embedding is None
    assert again.scheduler.has("image 5")
    assert right(*reader.run(request(*images)), *images)
    assert reader.encoded == 0


def test_other_weights_find_nothing(engine):
    one = engine()
    one.run(request(image(1)))
    one.settle()
    one.scheduler.forget_everything("1")
    one.encoder_cache.clear()
    one.run(request(image(1)))
    assert one.encoded == 2
    one.settle()
    one.scheduler.forget_everything("2")
    assert one.scheduler.ready(request(), 0)


def test_adapters_that_change_embeddings_go_without_the_store(engine):
    one = engine()
    one.scheduler._adapters = True
    asked = request(image(1))
    asked.lora_request = object()
    assert one.scheduler.ready(asked, 0)
    one.scheduler.allocated(asked, 0)
    assert one.scheduler._work.saves == {}


def test_without_a_daemon_everything_is_computed(engine, tmp_path):
    one = engine(url=f"ipc://{tmp_path}/nobody", lookup_s=0.05, load_s=0.05)
    began = time.monotonic()
    for number in range(20):
        assert right(*one.run(request(image(number))), image(number))
    assert one.encoded == 20
    assert time.monotonic() - began < 10


def test_a_late_answer_is_not_waited_for(engine):
    now, one, asked = [0.0], engine(), request(image(1))
    one.scheduler._clock = lambda: now[0]
    free = threading.Event()
    one.scheduler._looking.submit(free.wait)  # so that no lookup is answered
    assert not one.scheduler.ready(asked, 0)
    assert not one.scheduler.ready(asked, 0)
    now[0] = 20.1
    assert one.scheduler.ready(asked, 0)
    assert not one.scheduler.has("image 1")
    one.scheduler.allocated(asked, 0)
    assert list(one.scheduler._work.saves) == ["image 1"]
    assert one.counters.take() == {"lookups": 1, "late_lookups": 1}
    free.set()


@pytest.mark.parametrize("requests", portion(60, 500))
def test_no_embedding_is_wrong_whatever_happens_to_the_daemon(make_daemon, engine, requests):
    """It is killed and stopped, and its memory is full."""
    daemon = make_daemon(host_bytes=256 << 10)
    model, chance = f"encoder {next(_models)}", random.Random(requests)
    options = {"url": daemon.url, "model": model, "lookup_s": 0.1, "load_s": 0.1}
    engines = [engine(**options), engine(**options)]
    stopped = False
    for _ in range(requests):
        event = chance.random()
        if event < 0.05:
            daemon.kill()
            daemon.start()
            stopped = False
        elif event < 0.1:
            daemon.signal(signal.SIGCONT if stopped else signal.SIGSTOP)
            stopped = not stopped
        one, images = chance.choice(engines), [image(chance.randrange(40)) for _ in range(2)]
        free = set(one.encoder_cache) - {each.identifier for each in images}
        [found] = one.run(request(*images), free=free)
        assert right(found, *images)
    assert not any(each.errors.counts["looking up an embedding"] for each in engines)
    if stopped:
        daemon.signal(signal.SIGCONT)
    one = engines[0]

    def found_again():
        one.run(request(image(1)))
        one.run(request(image(2)), free=list(one.encoder_cache))
        return one.run(request(image(1)), free=["image 1"]) and one.counters.take().get("found", 0)

    wait_until(found_again)


def test_pages_of_another_shape_are_refused():
    identity = Identity.of(KVSpec.embedding(width=4, dtype="float32"), model="m")
    key = EmbeddingKey(identity, bytes(32), 65)
    tensor = torch.randn(65, 4)
    pages = pages_of(tensor, key)
    assert pages.shape == (2, key.spec.page_bytes)
    assert torch.equal(embedding_of(pages, key), tensor)
    assert not pages[1, 16:].any(), "padded with zeros"
    for wrong in (tensor.half(), torch.randn(65, 5), torch.randn(64, 4)):
        with pytest.raises(UsageError, match="not stored"):
            pages_of(wrong, key)


def test_settings_are_checked():
    assert EncoderSettings.parse({"load_s": 1}).load_s == 1
    for wrong in ({"chunk_tokens": 64}, {"load_s": "1"}, {"hash_weights": "none"}):
        with pytest.raises(UsageError, match="ec_connector_extra_config"):
            EncoderSettings.parse(wrong)
