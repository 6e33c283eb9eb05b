"""An SGLang engine in a process of its own, with the commands of :mod:`tierstore_tools.vllm.child`.

>>> with SglangEngine(model, store="ipc:///run/tierstore.sock", share_engines=True) as engine:
...     engine.ask(Ask(prompt(900))).external_hit_tokens
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore_tools.vllm.asks import SHOWN_LOGPROBS, Answers, Ask, Batch, EngineJob, VllmAnswer
from tierstore_tools.vllm.child import main
from tierstore_tools.vllm.engine import ANSWER_S, RunningEngine

ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "random_seed": 1,
}
"""SGLang's arguments for a small model on a CPU."""
_OPTIONS: dict[str, Any] = {
    **ON_CPU,
    "dtype": "float32",
    "page_size": 64,
    "log_level": "info",
    "max_total_tokens": 16_384,
    "chunked_prefill_size": 8192,
}
HIERARCHICAL: dict[str, Any] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}
"""SGLang's arguments for a hierarchical cache that waits for its storage."""


def storage_options(url: str, **extra: Any) -> dict[str, Any]:
    """Return SGLang's arguments for the daemon at ``url``. ``extra`` are settings of the storage backend."""
    settings = {
        "backend_name": "tierstore",
        "module_path": "tierstore_connectors.sglang.backend",
        "class_name": "TierStoreHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": 64,
        "store": url,
        **extra,
    }
    return {
        **HIERARCHICAL,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(settings),
    }


class SglangEngine(RunningEngine):
    """A running SGLang on a CPU. ``options`` are arguments of ``sglang.Engine``, instead of the defaults
    above. ``stand_ins`` is a folder with modules that replace SGLang's modules for GPUs. Raises
    :class:`~tierstore_tools.vllm.engine.EngineDiedError`."""

    def __init__(
        self,
        model: str | Path,
        *,
        stand_ins: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        path = os.pathsep.join(
            str(each) for each in (stand_ins, os.environ.get("PYTHONPATH")) if each is not None
        )
        ranks = int(options.get("tp_size", 1))
        more = {
            "PYTHONPATH": path,
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        }
        super().__init__(
            "tierstore_tools.sglang",
            EngineJob(str(model), {**_OPTIONS, **options}),
            environment={**os.environ, **more, **(environment or {})},
            python=python,
        )

    def reset(self) -> bool:
        """Empty SGLang's own caches, but not the store."""
        self._say({"do": "reset", "connector": False})
        return self._hear(bool, ANSWER_S)


class _ChildSglang:
    """An SGLang engine that gets one request at a time. The time to the first token is measured."""

    def __init__(self, job: EngineJob) -> None:
        import sglang

        self._engine = sglang.Engine(model_path=job.model, **job.options)

    def ask(self, batch: Batch) -> Answers:
        started, cpu = time.perf_counter(), time.process_time()
        answers, stored, local = [], 0, 0
        for ask in batch.asks:
            answer, details = self._answer(ask)
            answers.append(answer)
            stored += details.get("storage", 0)
            local += details.get("device", 0) + details.get("host", 0)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        return Answers(answers, stored, local, wall, cpu, 0)

    def _answer(self, ask: Ask) -> tuple[VllmAnswer, dict[str, int]]:
        params = {"temperature": 0, "max_new_tokens": ask.max_tokens, "ignore_eos": True}
        began, ttft = time.perf_counter(), 0.0
        said: dict[str, Any] = {}
        for said in self._engine.generate(  # noqa: B007  # the last one has all of the answer
            input_ids=ask.tokens,
            sampling_params=params,
            return_logprob=True,
            top_logprobs_num=SHOWN_LOGPROBS,
            stream=True,
            cache_salt=ask.salt,
        ):
            ttft = ttft or time.perf_counter() - began
        about = said["meta_info"]
        answer = VllmAnswer(
            tokens=list(said["output_ids"]),
            logprobs=[
                {int(token): float(value) for value, token, _ in place}
                for place in about["output_top_logprobs"]
            ],
            cached_tokens=int(about["cached_tokens"]),
            ttft_s=ttft,
            total_s=time.perf_counter() - began,
            finish=str(about["finish_reason"]["type"]),
        )
        return answer, about.get("cached_tokens_details") or {}

    def reset(self, connector: bool) -> bool:
        self._engine.flush_cache()
        return True

    def close(self) -> None:
        self._engine.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), _ChildSglang)
