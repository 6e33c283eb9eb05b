"""An engine in a process of its own: commands come on one descriptor, answers go to another, as JSON lines.

``python -m tierstore_tools.vllm.child COMMANDS_FD ANSWERS_FD``: the first line is the :class:`EngineJob`,
then ``{"do": "ask", …}``, ``{"do": "reset", …}``, ``{"do": "switch", …}``, ``{"do": "metrics"}`` until the
commands end. vLLM may write to stdout and stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tierstore_tools.vllm.asks import SHOWN_LOGPROBS, Answers, Ask, Batch, EngineJob, VllmAnswer


class _RunningRequest:
    """A request that runs, timed from outside the engine."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self._started = time.perf_counter()
        self._ttft = 0.0
        self._ended = 0.0
        self._output: Any = None
        self.aborted = False

    def see(self, output: Any) -> None:
        now = time.perf_counter()
        if output.outputs[0].token_ids and not self._ttft:
            self._ttft = now - self._started
        self._ended = now - self._started
        self._output = output

    @property
    def to_abort(self) -> bool:
        if self.ask.abort_after is None or self.aborted:
            return False
        return len(self._tokens()) >= self.ask.abort_after

    def answer(self) -> VllmAnswer:
        done = None if self._output is None else self._output.outputs[0]
        return VllmAnswer(
            tokens=self._tokens(),
            logprobs=[
                {int(token): float(each.logprob) for token, each in place.items()}
                for place in (done.logprobs if done is not None else None) or ()
            ],
            cached_tokens=0 if self._output is None else self._output.num_cached_tokens or 0,
            ttft_s=self._ttft,
            total_s=self._ended,
            finish="aborted" if self.aborted or done is None else str(done.finish_reason),
            params=None if self._output is None else self._output.kv_transfer_params,
        )

    def _tokens(self) -> list[int]:
        return [] if self._output is None else [int(token) for token in self._output.outputs[0].token_ids]


class _ChildEngine:
    """vLLM's synchronous engine. The engine is stepped in this process, so that first tokens can be timed."""

    def __init__(self, job: EngineJob) -> None:
        from vllm import LLM

        self._llm = LLM(model=job.model, **job.options)
        self._engine = self._llm.llm_engine
        self._asked = 0
        self._adapters: dict[str, int] = {}

    def ask(self, batch: Batch) -> Answers:
        before = self.metrics()
        started, cpu = time.perf_counter(), time.process_time()
        running = {}
        for ask in batch.asks:
            name = str(self._asked)
            self._asked += 1
            running[name] = _RunningRequest(ask)
            self._add(name, ask)
        steps = 0
        self._abort(running)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                running[output.request_id].see(output)
            steps += 1
            self._abort(running)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        after = self.metrics()
        external, local = (
            int(after.get(name, 0) - before.get(name, 0))
            for name in ("vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits")
        )
        return Answers([each.answer() for each in running.values()], external, local, wall, cpu, steps)

    def _add(self, name: str, ask: Ask) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(
            temperature=0.0,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            logprobs=SHOWN_LOGPROBS,
            prompt_logprobs=SHOWN_LOGPROBS if ask.prompt_logprobs else None,
            detokenize=False,
            extra_args=None if ask.params is None else {"kv_transfer_params": ask.params},
        )
        prompt: dict[str, Any] = {"prompt_token_ids": ask.tokens}
        if ask.salt is not None:
            prompt["cache_salt"] = ask.salt
        adapter = None
        if ask.adapter is not None:
            number = self._adapters.setdefault(ask.adapter, len(self._adapters) + 1)
            adapter = LoRARequest(os.path.basename(ask.adapter), number, ask.adapter)
        self._engine.add_request(name, prompt, params, lora_request=adapter)

    def _abort(self, running: dict[str, _RunningRequest]) -> None:
        names = [name for name, each in running.items() if each.to_abort]
        for name in names:
            running[name].aborted = True
        if names:
            self._engine.abort_request(names)

    def metrics(self) -> dict[str, float]:
        """Return every counter, gauge and histogram's sum and count, added up over the labels."""
        found: dict[str, float] = {}
        from prometheus_client import REGISTRY

        for family in REGISTRY.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    name = sample.name.removesuffix("_total")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def reset(self, connector: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def switch(self, on: bool) -> bool:
        from tierstore_tools.vllm import switched

        switched.switch(on)
        return on

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def main(commands_fd: int, answers_fd: int, make: Callable[[EngineJob], Any] = _ChildEngine) -> None:
    """Make the engine of the first line with ``make``, and answer the other lines."""
    with os.fdopen(commands_fd, "rb") as commands, os.fdopen(answers_fd, "wb") as answers:

        def say(what: object) -> None:
            answers.write(msgspec.json.encode(what) + b"\n")
            answers.flush()

        engine = make(msgspec.json.decode(commands.readline(), type=EngineJob))
        say({"ready": os.getpid()})
        for line in commands:
            command = msgspec.json.decode(line)
            if command["do"] == "ask":
                say(engine.ask(msgspec.json.decode(line, type=Batch)))
            elif command["do"] == "reset":
                say(engine.reset(command["connector"]))
            elif command["do"] == "switch":
                say(engine.switch(command["on"]))
            else:
                say(engine.metrics())
        engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
