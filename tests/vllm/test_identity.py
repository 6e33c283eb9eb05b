"""Which engines share pages: by vLLM's own configuration, and between engines that differ in one thing."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import shutil
import subprocess
import sys

import pytest

from tests.vllm import models
from tests.vllm.counted_fields import COUNTED, UNUSED
from tests.vllm.engines import Ask, Engine
from tests.vllm.harness import patient, same, wait_hit
from tests.vllm.models import prompt
from tierstore_connectors.vllm.fields import HARMLESS
from tierstore_tools.vllm.engine import ENVIRONMENT

LONG = prompt(700)
ALIGNED = 640


def test_every_field_of_vllms_configuration_was_looked_at():
    """If this fails: decide whether the field can change KV, and add it to one of the two lists."""
    import vllm.config

    unknown = []
    for module in pkgutil.iter_modules(vllm.config.__path__):
        found = importlib.import_module(f"vllm.config.{module.name}")
        for name, kind in vars(found).items():
            if not (inspect.isclass(kind) and dataclasses.is_dataclass(kind)):
                continue
            if kind.__module__ != found.__name__ or name in UNUSED:
                continue
            fields = {each.name for each in dataclasses.fields(kind)}
            listed = COUNTED.get(name, frozenset()), HARMLESS.get(name, frozenset())
            assert not listed[0] & listed[1], (name, listed[0] & listed[1])
            unknown += [f"{name}.{field}" for field in sorted(fields - listed[0] - listed[1])]
    assert not unknown


def test_the_models_that_do_not_look_at_the_longest_prompt():
    from vllm.model_executor.models import registry

    from tierstore_connectors.vllm.fields import ANY_LENGTH_MODELS

    for name in ANY_LENGTH_MODELS:
        module = registry._TEXT_GENERATION_MODELS[name][0]
        source = importlib.util.find_spec(f"vllm.model_executor.models.{module}").origin
        with open(source) as file:
            assert "max_model_len" not in file.read(), name


_DESCRIBE = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs
from tierstore_connectors.vllm.identity import model_digest, weights_revision
for line in sys.stdin:
    job = json.loads(line)
    os.environ.update(job["environment"])
    config = EngineArgs(**job["options"]).create_engine_config()
    print("found", json.dumps([
        model_digest(config, "1", ["b"], "cpu", "", os.environ),
        weights_revision(config, "").revision,
    ]), flush=True)
    for name in job["environment"]:
        del os.environ[name]
"""


class Identities:
    """The identities that vLLM's own configuration leads to, from a process of its own."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _DESCRIBE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"},
        )

    def of(self, place, environment=(), **options):
        options = {"model": str(place), "dtype": "float32", "enforce_eager": True, **options}
        job = {"options": {"max_model_len": 4096, **options}, "environment": dict(environment)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("found "):
                return tuple(json.loads(line.removeprefix("found ")))
        raise AssertionError(f"no configuration for {job}")

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


@pytest.fixture
def identities():
    made = []

    def make():
        made.append(Identities())
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_one_deployment_has_one_identity_and_other_computing_another(model, identities, tmp_path):
    place = model(models.LLAMA)
    first, second = identities(), identities()
    base = first.of(place)
    assert second.of(place) == base  # in another process
    elsewhere = tmp_path / "mounted elsewhere"
    shutil.copytree(place, elsewhere)
    transfer = {
        "kv_connector": "TierStoreConnector",
        "kv_connector_module_path": "tierstore_connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": f"ipc://{tmp_path}/s"},
    }
    for harmless in (
        {"max_num_seqs": 7, "max_num_batched_tokens": 4100},
        {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 100},
        {"max_model_len": 1024},
        {"seed": 5, "served_model_name": "other", "max_logprobs": 3, "generation_config": "vllm"},
        {"kv_transfer_config": transfer},
        {"kv_transfer_config": {**transfer, "kv_role": "kv_consumer", "engine_id": "x"}},
        {"environment": {"VLLM_PORT": "12345", "VLLM_HOST_IP": "127.0.0.2", "VLLM_LOGGING_LEVEL": "INFO"}},
        {"environment": {"VLLM_SERVICE_HOST": "10.0.0.7", "VLLM_PORT_8000_TCP": "tcp://10.0.0.7:8000"}},
        {"tokenizer": str(place), "disable_log_stats": True, "block_size": 64},
    ):
        assert first.of(place, **harmless) == base, harmless
    assert first.of(elsewhere) == base
    found = [
        first.of(place, **counts)
        for counts in (
            {"dtype": "bfloat16"},
            {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}},
            {"hf_overrides": {"rms_norm_eps": 1e-5}},
            {"enable_lora": True},
            {"prefix_caching_hash_algo": "sha256_cbor"},
            {"additional_config": {"anything": 1}},
            {"environment": {"VLLM_FLOAT32_MATMUL_PRECISION": "high"}},
            {"environment": {"VLLM_DISABLED_KERNELS": "x"}},
        )
    ]
    (elsewhere / "processor_config.json").write_text("{}")
    found.append(first.of(elsewhere))
    weights = next(elsewhere.glob("*.safetensors"))
    status = weights.stat()
    with weights.open("r+b") as file:  # one byte, under one size and time
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    found.append(first.of(elsewhere))
    draft = {"method": "draft_model", "model": str(place), "num_speculative_tokens": 2}
    found.append(first.of(place, speculative_config=draft))
    found.append(first.of(place, speculative_config={**draft, "model": str(elsewhere)}))
    assert len({base, *found}) == len(found) + 1, found


def test_the_longest_prompt_of_a_longrope_model_and_a_processors_options_count(model, identities):
    describe = identities()
    phi = model(models.PHI3_LONGROPE)
    assert describe.of(phi, max_model_len=512) == describe.of(phi, max_model_len=512, max_num_seqs=3)
    assert describe.of(phi, max_model_len=512) != describe.of(phi, max_model_len=1024)


def test_engines_with_other_rotary_factors_share_nothing(model, daemon):
    """Phi-3 takes the long factors when the longest prompt is beyond those that it was trained with."""
    options = patient(daemon.url)
    with Engine(model(models.PHI3_LONGROPE), connector=options, max_model_len=1024) as engine:
        short = engine.ask(Ask(LONG))
        wait_hit(engine, Ask(LONG), ALIGNED)
    with Engine(model(models.PHI3_LONGROPE), connector=options, max_model_len=2048) as engine:
        long = engine.ask(Ask(LONG))
        assert long.external_hit_tokens == 0
        assert long.answers[0].logprobs != short.answers[0].logprobs
    more = {"max_num_seqs": 3, "max_num_batched_tokens": 2048, "blocks": 512}
    with Engine(model(models.PHI3_LONGROPE), connector=options, max_model_len=1024, **more) as engine:
        warm = engine.ask(Ask(LONG))
        assert warm.external_hit_tokens == ALIGNED
        assert same(warm, short)
        assert "identified the model by" in engine.log
