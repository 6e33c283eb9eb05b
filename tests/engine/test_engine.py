"""The engine from outside: streams, stops, seeds, cancelling, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from tierstore.errors import UsageError
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RequestError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion, FinishReason, StepOutput
from tierstore_engine.sampling import SamplingParams

EngineOf = Callable[..., Engine]

TEXT = "The quick brown fox jumps over the lazy dog. " * 3
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, top_k=50, top_p=0.95, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def completion_of(outputs: list[StepOutput]) -> Completion:
    assert outputs[-1].completion is not None
    assert all(output.completion is None for output in outputs[:-1])
    return outputs[-1].completion


def test_a_stream_adds_up_to_its_completion(tiny: LoadedModel, engine_of: EngineOf) -> None:
    outputs = list(engine_of(tiny).stream(TEXT, GREEDY))
    completion = completion_of(outputs)
    assert "".join(output.text for output in outputs) == completion.text
    assert tuple(token for output in outputs for token in output.tokens) == completion.tokens
    assert len(outputs) == len(completion.tokens) == 24
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.text == tiny.tokenizer.decode(completion.tokens)


def test_metrics(tiny: LoadedModel, engine_of: EngineOf) -> None:
    [completion] = engine_of(tiny).generate([TEXT], GREEDY)
    metrics = completion.metrics
    assert metrics.prompt_tokens == len(TEXT) + 1
    assert metrics.generated_tokens == 24
    assert len(metrics.itl_s) == 23
    assert 0 < metrics.ttft_s < 30
    assert metrics.tokens_per_s > 0
    assert metrics.reused_tokens == metrics.loaded_bytes == metrics.preemptions == 0


def test_streams_may_be_nested_and_mixed(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    alone = engine.generate([TEXT, "other"], GREEDY)
    first, second = engine.stream(TEXT, GREEDY), engine.stream("other", GREEDY)
    texts = ["", ""]
    for one in first:
        texts[0] += one.text
        texts[1] += "".join(output.text for _, output in zip(range(2), second, strict=False))
    texts[1] += "".join(output.text for output in second)
    assert texts == [completion.text for completion in alone]


def test_a_closed_stream_gives_its_pages_back(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    stream = engine.stream(TEXT, GREEDY)
    next(stream)
    assert engine.stats().admitted == 1
    stream.close()
    assert not engine.has_work
    assert engine.stats().available_pages == engine.stats().total_pages


def test_cancel(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny, max_sequences=1, schedule="fcfs")
    running, waiting = engine.add(TEXT, GREEDY), engine.add("waits", GREEDY)
    text = "".join(output.text for _ in range(5) for output in engine.step())
    assert engine.cancel(running)
    assert engine.cancel(waiting)
    assert not engine.cancel(running)
    ended = {output.request_id: output for output in engine.step()}
    assert ended.keys() == {running, waiting}
    assert all(output.completion.finish_reason is FinishReason.CANCELLED for output in ended.values())
    assert ended[running].completion.text == text + ended[running].text
    assert ended[waiting].completion.tokens == ()
    assert not engine.has_work


def test_a_seed_decides_whatever_else_runs(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    [alone] = engine.generate([TEXT], SAMPLED)
    crowd = engine.generate(["a", TEXT, "b" * 100, TEXT], SAMPLED)
    assert crowd[1].tokens == crowd[3].tokens == alone.tokens
    other = SamplingParams(max_new_tokens=24, temperature=1.0, seed=6, ignore_eos=True)
    assert engine.generate([TEXT], other)[0].tokens != alone.tokens


def test_a_seed_decides_across_preemptions(tiny: LoadedModel, engine_of: EngineOf) -> None:
    params = SamplingParams(max_new_tokens=100, temperature=1.0, seed=5, ignore_eos=True)
    [alone] = engine_of(tiny).generate([TEXT], params)
    crowd = engine_of(tiny, pool_pages=2 * 9 + 4).generate([TEXT, TEXT], params)
    assert sum(completion.metrics.preemptions for completion in crowd) > 0
    assert all(completion.tokens == alone.tokens for completion in crowd)


def test_stop_strings(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    [whole] = engine.generate([TEXT], SAMPLED)
    stop = whole.text[10:12]
    cut = whole.text.index(stop)
    params = SamplingParams(
        max_new_tokens=24, temperature=1.0, top_k=50, top_p=0.95, seed=5, ignore_eos=True, stop=(stop,)
    )
    outputs = list(engine.stream(TEXT, params))
    assert "".join(output.text for output in outputs) == whole.text[:cut]
    assert completion_of(outputs).text == whole.text[:cut]
    assert completion_of(outputs).finish_reason is FinishReason.STOP


def test_stop_tokens(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    [whole] = engine.generate([TEXT], GREEDY)
    stop = whole.tokens[7]
    first = whole.tokens.index(stop)
    [completion] = engine.generate([TEXT], SamplingParams(max_new_tokens=24, stop_token_ids=(stop,)))
    assert completion.tokens == whole.tokens[: first + 1]
    assert completion.text == tiny.tokenizer.decode(whole.tokens[:first])
    assert completion.finish_reason is FinishReason.STOP


def test_kept_logits_and_logprobs_agree(tiny: LoadedModel, engine_of: EngineOf) -> None:
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, keep_logits=True, logprobs=3)
    [completion] = engine_of(tiny).generate([TEXT], params)
    assert completion.logits is not None
    assert completion.logits.shape == (5, tiny.config.vocab_size)
    assert completion.logits.dtype == np.float32
    for row, token, entry in zip(completion.logits, completion.tokens, completion.logprobs, strict=True):
        assert token == row.argmax() == entry.chosen.token == entry.top[0].token
        exact = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert entry.chosen.logprob == pytest.approx(exact[token], abs=1e-4)
        assert len(entry.top) == 3


def test_the_last_position_ends_it(tiny: LoadedModel, engine_of: EngineOf) -> None:
    limit = tiny.config.max_positions
    engine = engine_of(tiny, pool_pages=limit // 16, prefill_chunk=2048)
    [completion] = engine.generate([[5] * (limit - 3)], SamplingParams(max_new_tokens=50, ignore_eos=True))
    assert len(completion.tokens) == 3
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([0, 258], "between 0 and 257"),
        ([-1], "between 0 and 257"),
        ([0] * 8192, "has 8192 tokens, but the model allows 8192"),
        ([0] * 1100, r"1100 tokens and up to 24 new ones need 71 pages, but the pool has 64"),
    ],
)
def test_requests_that_can_never_be_served(
    prompt: list[int], message: str, tiny: LoadedModel, engine_of: EngineOf
) -> None:
    engine = engine_of(tiny)
    with pytest.raises(RequestError, match=message):
        engine.generate(["fine", prompt], GREEDY)
    assert not engine.has_work


def test_a_refused_session_leaves_nothing_behind(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    with pytest.raises(UsageError, match="session"):
        engine.add(TEXT, GREEDY, session="")
    with pytest.raises(UsageError, match="session"):
        engine.beam_search("a", session="")
    engine.cancel_all()
    assert not engine.has_work


def test_a_prefill_chunk_must_end_with_a_page(tiny: LoadedModel, engine_of: EngineOf) -> None:
    with pytest.raises(UsageError, match="multiple of the page's 16 tokens"):
        engine_of(tiny, prefill_chunk=100)


def test_async_streams_share_the_steps(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    prompts = [TEXT, "another", "third " * 20]
    expected = [completion.text for completion in engine.generate(prompts, GREEDY)]

    async def text_of(prompt: str) -> str:
        return "".join([output.text async for output in engine.astream(prompt, GREEDY)])

    async def all_texts() -> list[str]:
        return await asyncio.gather(*map(text_of, prompts))

    steps = engine.stats().steps
    assert asyncio.run(all_texts()) == expected
    assert engine.stats().steps - steps < 3 * 24
    assert asyncio.run(all_texts()) == expected  # from another event loop


def test_an_async_stream_can_be_left(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)

    async def leave_early() -> None:
        stream = engine.astream(TEXT, GREEDY)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave_early())
    engine.step()
    assert not engine.has_work


def test_async_errors_reach_the_caller(tiny: LoadedModel, engine_of: EngineOf) -> None:
    async def consume(prompt: list[int]) -> None:
        async for _ in engine.astream(prompt, GREEDY):
            pass

    engine = engine_of(tiny)
    with pytest.raises(RequestError, match="prompt is empty"):
        asyncio.run(consume([]))


def test_prefix_chunks_are_bit_equal_wherever_they_begin(tiny: LoadedModel, engine_of: EngineOf) -> None:
    """Equal prompts are cut equally, so two runs give equal bits, also with other pages in use."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, keep_logits=True)
    engine = engine_of(tiny, prefill_chunk=32)
    [first] = engine.generate([TEXT], params)
    engine.add("takes the first pages", SamplingParams(max_new_tokens=1, ignore_eos=True))
    engine.step()
    [second] = engine.generate([TEXT], params)
    assert np.array_equal(first.logits, second.logits)
