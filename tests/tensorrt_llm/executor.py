"""A small executor that calls a connector as TensorRT-LLM's does, over pools on the CPU.

The KV of a token is a digest of its id, the model's weights, the rank, and **all KV before it as it is in the
blocks**. So one wrong byte in a block changes every token that is generated behind it. A block is filled with
noise when it gets a new owner.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from tensorrt_llm import _utils
from tensorrt_llm._torch.pyexecutor.kv_cache_connector import RequestData, SchedulerOutput

from tests.tensorrt_llm.arguments import arguments
from tierstore_connectors.tensorrt_llm import TierStoreScheduler, TierStoreWorker

LAYERS, WIDTH = 2, 16
_ROW_BYTES = LAYERS * 2 * WIDTH * 2
OF_REQUESTS = [
    "lora_task_id",
    "lora_weights",
    "prompt_embedding_table",
    "multimodal_embedding",
    "multimodal_hashes",
    "mrope_rotary_cos_sin",
    "position_ids",
    "cache_salt_id",
]


class Request:
    """One request, as Python sees it. ``copied`` is what a lookup sees: TensorRT-LLM's C++ part passes a copy
    without Python's fields."""

    def __init__(self, number, prompt, count, **fields):
        self.request_id = number
        self.prompt_len = len(prompt)
        self.count = count
        self.host_tokens = list(prompt)  # the overlap scheduler knows a token one pass late
        self.tokens = list(prompt)
        self.blocks = []
        self.position = 0  # computed tokens
        self.py_multimodal_data = fields.pop("py_multimodal_data", None)
        self.py_lora_path = fields.pop("py_lora_path", None)
        self.sampling_config = SimpleNamespace(beam_width=fields.pop("beam_width", 1))
        self.fields = {**dict.fromkeys(OF_REQUESTS), **fields}
        self.matched = 0
        self.finished = False

    def get_tokens(self, beam):
        assert beam == 0
        return self.host_tokens

    def copied(self):
        return SimpleNamespace(
            request_id=self.request_id,
            prompt_len=self.prompt_len,
            get_tokens=self.get_tokens,
            sampling_config=self.sampling_config,
            **self.fields,
        )


class Executor:
    """``ranks`` processes in one. ``before`` is called with the name of each call to the connector."""

    def __init__(self, model, *, ranks=1, blocks=24, chunk=None, overlap=False, cache=None, **values):
        self.cache = {"tokens_per_block": 32, **(cache or {})}
        self.block_tokens = self.cache["tokens_per_block"]
        self.chunk, self.overlap = chunk, overlap
        self.seed = Path(model, "model.safetensors").read_bytes()
        self.before = lambda name: None
        self.pools = [
            torch.zeros((blocks, LAYERS, 2, self.block_tokens * WIDTH), dtype=torch.int16)
            for _ in range(ranks)
        ]
        self.free = list(range(blocks))
        self.tree = {}  # token prefix -> block, oldest first
        self.users = defaultdict(int)
        self.active, self.seen, self.loads = [], {}, {}
        self.started = []  # the last pass of the overlap scheduler: requests with their sampled tokens
        self.hits = 0  # tokens that the connector matched
        self.computed = 0
        self.numbers = 0
        self.workers = []
        for rank in range(ranks):
            given = arguments(model, cache=self.cache, tensor_parallel_size=ranks, **values)
            _utils.RANK = rank
            self.workers.append(TierStoreWorker(given))
            if rank == 0:
                self.scheduler = TierStoreScheduler(given)
        for worker, pool in zip(self.workers, self.pools, strict=True):
            worker.register_kv_caches(pool)
        _utils.RANK = 0

    # -- requests ----------------------------------------------------------------------------------------

    def generate(self, *prompts, count=4, **fields):
        """Return the generated tokens of each prompt."""
        requests = []
        for prompt in prompts:
            self.numbers += 1
            requests.append(Request(self.numbers, prompt, count, **fields))
        waiting = list(requests)
        while waiting or self.active or self.started:
            while waiting and self._admit(waiting[0]):
                self.active.append(waiting.pop(0))
            self._pass()
        return [request.tokens[request.prompt_len :][:count] for request in requests]

    def _admit(self, request):
        """Allocate blocks for the whole request (TensorRT-LLM's GUARANTEED_NO_EVICT), or return False."""
        size = self.block_tokens
        matched, held = [], request.host_tokens
        while (len(matched) + 1) * size < request.prompt_len:
            block = self.tree.get(tuple(held[: (len(matched) + 1) * size]))
            if block is None:
                break
            matched.append(block)
        needed = -(-(request.prompt_len + request.count + 1) // size) - len(matched)
        for block in matched:
            self.users[block] += 1
        if not self._reclaim(needed):
            for block in matched:
                self.users[block] -= 1
            return False
        self._ask(request, len(matched) * size)
        for _ in range(needed):
            block = self.free.pop()
            self.users[block] = 1
            for pool in self.pools:
                pool[block] = torch.randint(-30000, 30000, pool.shape[1:], dtype=torch.int16)
            matched.append(block)
        request.blocks = matched
        self.before("update_state_after_alloc")
        self.scheduler.update_state_after_alloc(request, list(request.blocks[: self._count(request)]))
        return True

    def _ask(self, request, computed):
        self.before("get_num_new_matched_tokens")
        found, later = pickle.loads(
            pickle.dumps(self.scheduler.get_num_new_matched_tokens(request.copied(), computed))
        )
        assert not later
        assert computed + found < request.prompt_len
        self.hits += found
        request.matched, request.position = found, computed + found
        if found:
            self.loads[request.request_id] = found

    def _count(self, request):
        return -(-len(request.host_tokens) // self.block_tokens)

    def _reclaim(self, needed):
        for tokens, block in list(self.tree.items()):
            if len(self.free) >= needed:
                break
            if not self.users[block]:
                del self.tree[tokens]
                self.free.append(block)
        return len(self.free) >= needed

    def _end(self, request):
        self.before("request_finished")
        assert self.scheduler.request_finished(request, list(request.blocks)) is False
        size = self.block_tokens
        for at, block in enumerate(request.blocks):
            self.users[block] -= 1
            kept = tuple(request.tokens[: (at + 1) * size])
            whole = (at + 1) * size <= min(request.position, len(request.tokens))
            if not self.users[block] and block not in self.tree.values():
                if whole and kept not in self.tree:
                    self.tree[kept] = block
                else:
                    self.free.append(block)
        self.active.remove(request)

    # -- one pass ----------------------------------------------------------------------------------------

    def _pass(self):
        scheduled = list(self.active)
        if scheduled:
            self._start(self._report(scheduled))
            sampled = [self._forward(request) for request in scheduled]
            for worker in self.workers:
                self.before("wait_for_save")
                worker.wait_for_save(None)
        else:
            sampled = []
        now = [pair for pair in zip(scheduled, sampled, strict=True) if pair[1] is not None]
        for request, token in now:
            request.tokens.append(token)
        done, self.started = (self.started, now) if self.overlap else (now, [])
        for request, token in done:
            if request.finished:
                continue  # the pass that was started before its end was known
            request.host_tokens.append(token)
            if len(request.host_tokens) == request.prompt_len + request.count:
                request.finished = True
                self._end(request)
        for worker in self.workers:
            assert worker.get_finished([], []) == ([], [])

    def _report(self, scheduled):
        output = SchedulerOutput()
        for request in scheduled:
            new = request.request_id not in self.seen
            tokens, blocks = self.seen.setdefault(request.request_id, [0, 0])
            known = request.blocks[: self._count(request)]
            context = request.position < request.prompt_len
            position = request.position if context else len(request.host_tokens) - 1
            data = RequestData(
                request.request_id,
                request.host_tokens[tokens:],
                known[blocks:],
                position - self.loads.pop(request.request_id, 0),
                self._size(request) if context else 1,
            )
            self.seen[request.request_id] = [len(request.host_tokens), len(known)]
            (output.new_requests if new else output.cached_requests).append(data)
        return output

    def _size(self, request):
        return min(request.prompt_len - request.position, self.chunk or request.prompt_len)

    def _start(self, output):
        self.before("build_connector_meta")
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(metadata))
            self.before("start_load_kv")
            worker.start_load_kv(None)

    def _forward(self, request):
        """Compute a request's next tokens. Return the sampled one, or None in the middle of a prompt."""
        context = request.position < request.prompt_len
        count = self._size(request) if context else 1
        for layer in range(LAYERS):
            for worker in self.workers:
                worker.wait_for_layer_load(layer, None)
        digests = []
        for rank, pool in enumerate(self.pools):
            for position in range(request.position, request.position + count):
                row = self._row(request, rank, pool, position)
                block, slot = divmod(position, self.block_tokens)
                place = pool[request.blocks[block]][:, :, slot * WIDTH : (slot + 1) * WIDTH]
                place.copy_(torch.frombuffer(row, dtype=torch.int16).view(LAYERS, 2, WIDTH))
            digests.append(bytes(row))
        for layer in range(LAYERS):
            for worker in self.workers:
                worker.save_kv_layer(layer, None)
        request.position += count
        self.computed += count
        if request.position < request.prompt_len:
            return None
        return int.from_bytes(hashlib.sha256(b"".join(digests)).digest()[:2], "big")

    def _row(self, request, rank, pool, position):
        whole, rest = divmod(position, self.block_tokens)
        state = hashlib.sha256(self.seed + bytes([rank]) + request.tokens[position].to_bytes(4, "big"))
        for block in request.blocks[:whole]:
            state.update(pool[block].numpy().tobytes())
        if rest:
            state.update(pool[request.blocks[whole]][:, :, : rest * WIDTH].contiguous().numpy().tobytes())
        return bytearray(hashlib.shake_256(state.digest()).digest(_ROW_BYTES))

    @property
    def saved(self):
        """The guarded stores of all ranks."""
        return [worker._pages.store for worker in self.workers]

    def flush(self):
        assert all(store.flush(60) for store in self.saved)

    @property
    def errors(self):
        found = dict(self.scheduler.errors.counts)
        for worker in self.workers:
            found |= dict(worker.errors.counts) | dict(worker._pages.store.errors.counts)
        return found
