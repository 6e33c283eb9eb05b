"""A real SGLang engine, in a process of its own: ``python -m tests.sglang.engine OPTIONS`` takes a JSON
object and prints one line of JSON, the answers to one prompt, asked twice."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierstore_tools.sglang import HIERARCHICAL, ON_CPU

_RESULT = "RESULT "
_START_S = 400
_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 10, "vocab_size": 512}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def write_model(folder: str) -> None:
    """Random weights that are large enough for KV of another prompt to change an answer."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(7)
    hidden, inner, words = _SHAPE["hidden_size"], _SHAPE["intermediate_size"], _SHAPE["vocab_size"]
    kv = _HEADS["num_key_value_heads"] * _HEADS["head_dim"]

    def matrix(*shape: int) -> Any:
        return (0.3 * torch.randn(shape)).bfloat16()

    weights = {"model.embed_tokens.weight": matrix(words, hidden), "lm_head.weight": matrix(words, hidden)}
    norms = ["model.norm"]
    for layer in range(_SHAPE["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        norms += [f"{name}input_layernorm", f"{name}post_attention_layernorm"]
        for part, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            weights[f"{name}{part}.weight"] = matrix(*shape)
    weights |= {f"{norm}.weight": torch.ones(hidden).bfloat16() for norm in norms}
    target = pathlib.Path(folder)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **_SHAPE,
        **_HEADS,
    }
    (target / "config.json").write_text(json.dumps(config))


def write_adapter(folder: str, seed: int) -> None:
    """A LoRA adapter of random weights, with files of one size and time for every seed."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    rank, hidden = 8, _SHAPE["hidden_size"]
    outputs = {"q_proj": hidden, "v_proj": _HEADS["num_key_value_heads"] * _HEADS["head_dim"]}
    weights = {}
    for layer in range(_SHAPE["num_hidden_layers"]):
        for part, out in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden).bfloat16()
            weights[f"{name}.lora_B.weight"] = torch.randn(out, rank).bfloat16()
    target = pathlib.Path(folder)
    target.mkdir(exist_ok=True)
    save_file(weights, target / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(outputs)}
    (target / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    for file in target.iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))


@dataclass(frozen=True)
class Answer:
    """Tokens, their log-probabilities, how many of the prompt's tokens came from the store, and the time."""

    tokens: list[int]
    logprobs: list[float]
    stored: int
    seconds: float


def ask(
    model: pathlib.Path,
    store: str | None,
    *,
    tokens: int = 200,
    ranks: int = 1,
    adapter: str | None = None,
    load: Mapping[str, str] | None = None,
    **extra: Any,
) -> list[Answer]:
    """Start an engine (over ``store``, if there is one), ask it a prompt of ``tokens`` tokens twice, and end
    it. ``load`` has adapters by name, which are loaded while the engine runs; ``adapter`` is asked."""
    options = {"model": str(model), "store": store, "tokens": tokens, "ranks": ranks, "extra": extra}
    options |= {"adapter": adapter, "load": dict(load or {})}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.engine", json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=False,
        env={
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        },
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    assert lines, f"the engine gave no answer:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [Answer(**each) for each in json.loads(lines[0].removeprefix(_RESULT))]


def arguments(model: pathlib.Path | str, ranks: int = 1) -> dict[str, Any]:
    """SGLang's, for a small model on a CPU."""
    return {
        "model_path": str(model),
        "tp_size": ranks,
        **ON_CPU,
        "dtype": "bfloat16",
        "max_total_tokens": 4096,
        "page_size": 16,
        "log_level": "warning",
    }


def storage(store: str) -> dict[str, str]:
    """What names our storage to SGLang."""
    settings = {
        "backend_name": "tierstore",
        "module_path": "tierstore_connectors.sglang.backend",
        "class_name": "TierStoreHiCache",
        "interface_v1": 1,
        "prefetch_threshold": 16,
        "store": store,
    }
    return {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(settings),
    }


class Server:
    """``python -m sglang.launch_server``, with a hierarchical cache and no storage. ``changes`` are arguments
    instead (None: left out)."""

    def __init__(self, model: pathlib.Path, changes: Mapping[str, Any] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._key = "secret"
        told = {**arguments(model), **HIERARCHICAL, "port": port, "admin_api_key": self._key}
        told = {name: value for name, value in {**told, **(changes or {})}.items() if value is not None}
        command = [sys.executable, "-m", "sglang.launch_server"]
        for name, value in told.items():
            command.append("--" + name.replace("_", "-"))
            command += [] if value is True else [str(value)]
        environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def __enter__(self) -> Server:
        until = time.monotonic() + _START_S
        while True:
            try:
                self._ask("GET", "/health", None)
            except OSError:
                assert self._process.poll() is None, "SGLang's server has ended"
                assert time.monotonic() < until, "SGLang's server does not answer"
                time.sleep(0.5)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def attach(self, store: str) -> None:
        named = storage(store)
        named["hicache_storage_backend_extra_config_json"] = named.pop("hicache_storage_backend_extra_config")
        self._ask("PUT", "/hicache/storage-backend", named)

    def detach(self) -> None:
        self._ask("DELETE", "/hicache/storage-backend", None)

    def flush(self) -> None:
        """Have SGLang forget what is in its own memory."""
        self._ask("POST", "/flush_cache", None)

    def generate(self, tokens: int) -> tuple[list[int], int]:
        """The answer, and how many of the prompt's tokens came from the storage."""
        answer = json.loads(self._ask("POST", "/generate", _question(tokens)))
        return answer["output_ids"], (answer["meta_info"].get("cached_tokens_details") or {}).get(
            "storage", 0
        )

    def _ask(self, method: str, path: str, body: object) -> bytes:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            said: bytes = answer.read()
        return said


def _question(tokens: int) -> dict[str, Any]:
    return {
        "input_ids": [5 + 7 * at % 500 for at in range(tokens)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    }


def _from_storage(answer: dict[str, Any]) -> int:
    return int((answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0))


def _main(options: dict[str, Any]) -> None:
    import sglang

    told = arguments(options["model"], options["ranks"])
    if options["store"] is not None:
        told |= HIERARCHICAL | storage(options["store"])
    engine = sglang.Engine(**(told | options["extra"]))
    for name, path in options["load"].items():
        assert engine.load_lora_adapter(name, path).success
    asked = {**_question(options["tokens"]), "return_logprob": True}
    if options["adapter"] is not None:
        asked["lora_path"] = options["adapter"]
    answers = []
    for _ in range(2):
        began = time.monotonic()
        answer = engine.generate(**asked)
        about = answer["meta_info"]
        answers.append(
            {
                "tokens": answer["output_ids"],
                "logprobs": [round(each[0], 6) for each in about["output_token_logprobs"]],
                "stored": _from_storage(answer),
                "seconds": time.monotonic() - began,
            }
        )
        time.sleep(1)  # SGLang saves behind the answer, and tells nobody when it has
    print(_RESULT + json.dumps(answers), flush=True)  # noqa: T201
    engine.shutdown()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
