"""Ranks in processes of their own: pages of any number of ranks serve any other. A rank that dies or hangs
ends the engine with one line and leaves no wrong page. ``test_matrix.py`` has ranks together with every other
feature."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.server.processes import Process
from tests.forked import Forked
from tests.portions import chosen
from tierstore.testing.clock import wait_until
from tierstore.tiers.hbm import HostRegion
from tierstore_engine.build import build_engine, load_model
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RankLostError
from tierstore_engine.outputs import Completion
from tierstore_engine.ranks import others as others_of
from tierstore_engine.ranks.messages import FromRank, RankLoaded, RankPong, RankSetup
from tierstore_engine.ranks.others import Others
from tierstore_engine.ranks.runner import RankedRunner
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step
from tierstore_engine.weights import weights_bytes

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
LONGEST_S = 10.0
FRESH = Others.spawn  # before conftest.py replaces it
MODELS = ("tiny", "tiny-moe", "tiny-deepseek", "tiny-gemma3", "tiny-qwen3-next")


@pytest.fixture
def engine_with(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes an engine of a preset over one store directory. ``ranks`` share the heads of each part."""
    engines: list[Engine] = []

    def make(
        ranks: int, name: str = "tiny", *, parts: int = 1, store: str | None = "store", pages: int = 64
    ) -> Engine:
        engines.append(
            build_engine(
                load_model(name, device="cpu", tensor_parallel=ranks, sequence_parallel=parts),
                pool_pages=pages,
                store=None if store is None else str(tmp_path / store),
                host_bytes=16 << 20,
                disk_bytes=64 << 20,
                chunk_tokens=16,
                settings=EngineSettings(prefill_chunk=64, plan="load"),
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def a_prompt(seed: int, tokens: int = 300) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(250) for _ in range(tokens)]


def others(engine: Engine) -> list[int]:
    """Return the process ids of the ranks besides the engine's own."""
    assert isinstance(engine.model, RankedRunner)
    return [process.pid for process in engine.model._others.processes]


def answer(engine: Engine, prompt: list[int]) -> Completion:
    [completion] = engine.generate([prompt], GREEDY)
    return completion


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("name", chosen(MODELS, "tiny-deepseek"))
def test_pages_of_any_number_of_ranks_serve_any_other(name: str, engine_with: Callable[..., Engine]) -> None:
    """A saved page has all heads."""
    prompt = a_prompt(1)
    expected = answer(engine_with(1, name, store=None), prompt).tokens
    for number, (ranks, parts) in enumerate([(2, 1), (1, 2), (1, 1)]):
        engine = engine_with(ranks, name, parts=parts)
        found = answer(engine, prompt)
        engine.close()
        assert found.tokens == expected
        assert bool(found.metrics.reused_by_tier.get("disk")) == (number > 0)


FAULTS = {
    "killed": (signal.SIGKILL, "^rank 1 of 2 was killed by signal 9: restart the engine$"),
    "hanging": (signal.SIGSTOP, "^rank 1 of 2 has not answered for 8 s: restart the engine$"),
}


@pytest.mark.parametrize(("fault", "ranks", "parts"), [("killed", 2, 1), ("hanging", 2, 1), ("killed", 1, 2)])
def test_a_lost_rank_ends_the_engine(
    fault: str, ranks: int, parts: int, engine_with: Callable[..., Engine]
) -> None:
    number, sentence = FAULTS[fault]
    prompt = a_prompt(2)
    expected = answer(engine_with(1, store=None), prompt).tokens
    engine = engine_with(ranks, parts=parts)
    engine.add(prompt, GREEDY)
    for _ in range(8):
        engine.step()
    os.kill(others(engine)[0], number)
    began = time.monotonic()
    with pytest.raises(RankLostError, match=sentence):
        finish(engine)
    assert time.monotonic() - began < LONGEST_S + 10  # the machine may be busy
    with pytest.raises(RankLostError, match=sentence):  # and so again
        answer(engine, prompt)
    engine.close()
    found = answer(engine_with(1), prompt)
    assert found.tokens == expected
    assert found.metrics.reused_tokens > 0


@pytest.mark.soak
def test_kills_at_any_time(engine_with: Callable[..., Engine]) -> None:
    """200 times, of any rank but rank 0: no hang, and no wrong page."""
    prompts = [a_prompt(seed, 200 + 30 * seed) for seed in range(4)]
    expected = [answer(engine_with(1, store=None), prompt).tokens for prompt in prompts]
    draw = random.Random(7)
    for _ in range(200):
        ranks, parts = draw.choice([(2, 1), (3, 1), (1, 2), (1, 4), (2, 2)])
        engine = engine_with(ranks, parts=parts)
        for prompt in prompts:
            engine.add(prompt, GREEDY)
        with suppress(RankLostError):
            for _ in range(draw.randrange(40)):
                engine.step()
            os.kill(draw.choice(others(engine)), signal.SIGKILL)
            began = time.monotonic()
            finish(engine)
        assert time.monotonic() - began < LONGEST_S
        engine.close()
        engine = engine_with(1)
        assert [answer(engine, prompt).tokens for prompt in prompts] == expected
        engine.close()


def test_parts_map_one_copy_of_the_weights(
    checkpoints: Callable[..., Path], engine_with: Callable[..., Engine]
) -> None:
    for name in ("tiny", str(checkpoints("falcon-h1"))):
        expected = answer(engine_with(1, name, store=None), a_prompt(9)).tokens
        engine = engine_with(1, name, parts=2, store=None)
        [pid] = others(engine)
        assert answer(engine, a_prompt(9)).tokens == expected
        nbytes = weights_bytes(engine.model.config)
        assert nbytes <= mapped_bytes(pid, "tierstore-weights") < 1.1 * nbytes
        assert not mapped_bytes(others(engine_with(2, name, store=None))[0], "tierstore-weights")


def test_each_layer_sends_two_sums_of_a_token(engine_with: Callable[..., Engine]) -> None:
    """Each sum has ``hidden_size`` numbers in float32."""
    engine = engine_with(2, store=None)
    completion = answer(engine, a_prompt(4))
    runner, config = engine.model, engine.model.config
    assert isinstance(runner, RankedRunner)
    rows = completion.metrics.prompt_tokens + completion.metrics.generated_tokens - 1
    assert runner.summed_bytes == rows * 2 * config.layers * config.hidden_size * 4
    assert runner.sent_bytes == [runner.summed_bytes]


@pytest.mark.parametrize("name", chosen(MODELS, "tiny"))
def test_a_prompt_longer_than_one_part(name: str, engine_with: Callable[..., Engine]) -> None:
    """Each of two parts holds about half of it. They send queries or KV, by the smaller number of bytes."""
    prompt = a_prompt(8, 864)  # 54 pages
    expected = answer(engine_with(1, name, store=None, pages=80), prompt).tokens
    engine = engine_with(1, name, parts=2, store=None, pages=60)
    runner, passed = engine.model, passing(engine)
    assert isinstance(runner, RankedRunner)
    large = engine.connector.pools[0].large_pages
    if name == "tiny":
        assert large.part_size == 30
    engine.add(prompt, GREEDY)
    while not engine.step():
        pass
    one, other = large.used
    assert abs(one - other) <= (1 if len(engine.connector.pools) == 1 else 3)  # windows let pages go
    assert max(one, other) <= large.part_size
    [pid] = others(engine)
    part = large.part_size * large.large_bytes
    assert part <= mapped_bytes(pid) <= part + 2 * 4096  # whole system pages of a file
    finish(engine)
    assert answer(engine, prompt).tokens == expected
    if len(engine.connector.pools) == 1:
        assert sum(runner.sent_bytes) == passed() > 0


def passing(engine: Engine) -> Callable[[], int]:
    """Return a function that counts the bytes between the parts of an engine, token by token."""
    runner, config, [pool, *_] = engine.model, engine.model.config, engine.connector.pools
    assert isinstance(runner, RankedRunner)
    [group], chunk = pool.spec.groups, pool.spec.chunk_tokens
    size, parts = pool.large_pages.part_size, pool.large_pages.parts
    out = group.head_dim if config.latent is None else config.latent.rank
    row = config.heads * (group.head_dim + out + 1) * 4
    steps: list[Step] = []

    def compute(step: Step) -> torch.Tensor:
        steps.append(step)
        return whole(step)

    whole, runner.compute = runner.compute, compute  # type: ignore[method-assign]

    def count() -> int:
        total = 0
        for step in steps:
            [span] = step.spans
            owners = [page // size for page in span.block_table]
            of_token = [owners[at // chunk] for at in range(span.stop)]
            asking = sum(len({*of_token[: at + 1]} - {of_token[at]}) for at in range(span.start, span.stop))
            tokens = -(-span.stop // chunk) * chunk
            by_kv = (parts - 1) * tokens * group.planes * group.kv_heads * group.head_dim * 4
            total += config.layers * min(asking * row, by_kv)
            last = sum(of_token[span.start + row] != 0 for row in step.logit_rows)
            total += last * config.hidden_size * 4
        return total

    return count


def test_an_error_at_rank_0_ends_all(
    engine_with: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(2)
    pids = others(engine)
    assert isinstance(engine.model, RankedRunner)

    def fail(step: Step) -> torch.Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(engine.model._model, "compute", fail)
    sentence = "^rank 0 failed in a step: MemoryError: no room: restart the engine$"
    with pytest.raises(RankLostError, match=sentence):
        answer(engine, a_prompt(5))
    engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("after", [RankPong, RankLoaded])
def test_a_rank_that_hangs_while_it_starts(
    after: type[FromRank], engine_with: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its first message when it is stopped, or is loaded and about to connect."""
    started = []

    def noted(*args: Any) -> subprocess.Popen[bytes]:
        started.append(FRESH(*args))
        return started[-1]

    class Stopping(Connection):
        def send(self, message: Any) -> None:
            if after is RankLoaded or not isinstance(message, RankSetup):
                super().send(message)

        def recv(self) -> Any:
            message = super().recv()
            if isinstance(message, after):
                os.kill(started[0].pid, signal.SIGSTOP)
            return message

    monkeypatch.setattr(Others, "spawn", staticmethod(noted))
    monkeypatch.setattr(others_of, "Connection", Stopping)
    monkeypatch.setattr(others_of, "_PING_S", 0.1)
    monkeypatch.setattr(others_of, "_LOADING_S", 1.5)
    with pytest.raises(RankLostError, match=r"^rank 1 of 2 has not answered for 1\.5 s: restart the engine$"):
        engine_with(2)


def test_an_interrupt_of_a_terminal_reaches_rank_0_only(
    engine_with: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before a rank's program can ignore it."""

    def interrupted(*args: Any) -> subprocess.Popen[bytes]:
        process = FRESH(*args)
        process.send_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(Others, "spawn", staticmethod(interrupted))
    engine = engine_with(2)
    assert answer(engine, a_prompt(6)).tokens


def test_other_weights_are_refused(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    """The checkpoint is replaced between the reading of two ranks."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("llama3"), folder)
    model = load_model(str(folder), device="cpu", tensor_parallel=2)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    sentence = "^rank 1 of 2 failed: the checkpoint has changed since rank 0 began to read it: restart"
    with pytest.raises(RankLostError, match=sentence):
        build_engine(model, pool_pages=64, chunk_tokens=16)


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (1, 2)])
def test_a_resized_pool_gives_its_memory_back(
    ranks: int, parts: int, engine_with: Callable[..., Engine]
) -> None:
    engine = engine_with(ranks, parts=parts, store=None)
    region = engine.connector.pool.region
    assert isinstance(region, HostRegion)
    fd, prompt = region.memory.fd, a_prompt(3)
    assert fd is not None
    expected = answer(engine, prompt).tokens
    held = os.fstat(fd).st_blocks
    engine.resize_pool(region.large_pages.large_bytes * 24)
    assert os.fstat(fd).st_blocks < held / 2
    assert [count for _, count in region.large_pages.present_parts()] == [24 // parts] * parts
    assert answer(engine, prompt).tokens == expected


def test_ranks_end_with_the_engine_that_is_killed() -> None:
    server = Process("--tensor-parallel", "2")
    try:
        [child] = children(server.process)
        server.process.kill()
        wait_until(lambda: not running(child))
    finally:
        server.close()


def test_a_fork_of_rank_0_does_not_keep_the_others(engine_with: Callable[..., Engine]) -> None:
    engine = engine_with(2)
    assert isinstance(engine.model, RankedRunner)
    [socket] = [connection.fileno() for connection in engine.model._others._connections]
    child = os.fork()
    if child == 0:
        os._exit(Path(f"/proc/self/fd/{socket}").exists())
    assert os.waitpid(child, 0)[1] == 0
    assert answer(engine, a_prompt(7)).tokens


def test_a_server_that_loses_a_rank_ends_with_one_line() -> None:
    server = Process("--tensor-parallel", "2")
    try:
        server.cached()
        os.kill(children(server.process)[0], signal.SIGKILL)
        with suppress(Exception):  # a client sees an error or a closed connection
            server.cached()
        assert server.process.wait(60) == 1
        assert (
            server.said.read()
            .splitlines()[-1]
            .endswith("rank 1 of 2 was killed by signal 9: restart the engine")
        )
    finally:
        server.close()


def children(process: Forked) -> list[int]:
    """Return the process ids of a process's children."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def mapped_bytes(pid: int, name: str = "tierstore-arena") -> int:
    """Return the bytes of pool memory, or of another shared memory, that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    ends = (line.split()[0].split("-") for line in lines if name in line)
    return sum(int(stop, 16) - int(start, 16) for start, stop in ends)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
