"""One engine to which things happen that change its weights, or may: ``python -m tests.vllm.changes MODEL
CONNECTOR EVENT…`` prints for each event how many tokens of a stored prompt were a hit before and after it, as
JSON lines. In the engine's own process, so that an event can come in the middle of a load."""

from __future__ import annotations

import json
import sys

from tests.vllm.models import prompt
from tierstore_connectors.vllm.transfers import BlockLoad

LONG, ALIGNED = prompt(700), 640
_STEPS = 100_000


class Engine:
    def __init__(self, model: str, connector: dict) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=1024,
            block_size=32,
            num_gpu_blocks_override=256,
            kv_transfer_config=connector,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self._params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)

    def cached(self) -> int:
        """How many tokens of the prompt come from the store."""
        self.llm.reset_prefix_cache()
        [answer] = self.llm.generate([{"prompt_token_ids": LONG}], self._params, use_tqdm=False)
        return int(answer.num_cached_tokens or 0)

    def stored(self) -> int:
        """The same, once it has been saved."""
        for _ in range(200):
            if (tokens := self.cached()) == ALIGNED:
                break
        return tokens

    def while_loading(self, event) -> None:
        """Have ``event`` raise in the middle of a load."""
        from vllm.v1.request import RequestStatus

        poll, engine = BlockLoad.poll, self.llm.llm_engine
        self.llm.reset_prefix_cache()
        BlockLoad.poll = lambda load: None
        engine.add_request("loading", {"prompt_token_ids": LONG}, self._params)
        for _ in range(_STEPS):
            engine.step()
            waits = {request.status for request in self.core.scheduler.requests.values()}
            if waits == {RequestStatus.WAITING_FOR_REMOTE_KVS}:
                break
        assert waits == {RequestStatus.WAITING_FOR_REMOTE_KVS}
        try:
            event()
        except RuntimeError as error:
            sys.stderr.write(f"{error}\n")
        else:
            raise AssertionError("vLLM resets in the middle of a load, and does not raise any more")
        finally:
            BlockLoad.poll = poll
            self.core.resume_scheduler()
        while engine.has_unfinished_requests():
            engine.step()

    # -- events ----------------------------------------------------------------------------------------

    def reset_vllms_own_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def read_the_model(self) -> None:
        self.llm.collective_rpc("get_model_inspection")

    def sleep_without_freeing(self) -> None:
        self.llm.sleep(level=0)
        self.llm.wake_up(["scheduling"])

    def reset(self) -> None:
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def reset_while_loading(self) -> None:
        self.while_loading(
            lambda: self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        )

    def pause_while_loading(self) -> None:
        self.while_loading(lambda: self.core.pause_scheduler("keep", clear_cache=True))

    def sleep_while_loading(self) -> None:
        self.while_loading(lambda: self.core.sleep(1, "keep"))

    def sleep(self) -> None:
        self.llm.sleep(level=1)
        self.llm.wake_up()

    def pause(self) -> None:
        self.core.pause_scheduler("abort", clear_cache=True)
        self.core.resume_scheduler()

    def name_a_version(self) -> None:
        self.llm.llm_engine.set_weight_version("2")

    def reload(self) -> None:
        self.llm.collective_rpc("reload_weights")

    def an_rpc_that_fails(self) -> None:
        try:
            self.llm.collective_rpc("update_weights", kwargs={"update_info": {}})
        except Exception as error:  # noqa: BLE001  # whatever vLLM raises: it may have written some of them
            sys.stderr.write(f"{error}\n")
        else:
            raise AssertionError("an update without weights has not failed")


HARMLESS = ("reset_vllms_own_cache", "read_the_model", "sleep_without_freeing")
CHANGES = (
    *("reset", "reset_while_loading", "pause_while_loading", "sleep_while_loading", "sleep", "pause"),
    *("name_a_version", "reload", "an_rpc_that_fails"),
)


def say(found: list) -> None:
    sys.stdout.write(f"found {json.dumps(found)}\n")
    sys.stdout.flush()


def main(model: str, connector: str, *events: str) -> None:
    engine = Engine(model, json.loads(connector))
    for event in events:
        before = engine.stored()
        getattr(engine, event)()
        say([event, before, engine.cached()])
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
