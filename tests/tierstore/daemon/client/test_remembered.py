from __future__ import annotations

import random

import pytest

from tests.daemons import SPEC
from tierstore.backend import PrefixHandle
from tierstore.client.state import prompt_part
from tierstore.keys import Identity, Prompt, encode_tokens
from tierstore.store.prompts import PromptCache, common_bytes

IDENTITY = Identity.of(SPEC, model="m")


class Session:
    identities = {IDENTITY.digest: 3}  # noqa: RUF012


def question_of(remembered, tokens):
    return remembered.request_of(IDENTITY, SPEC.page_bytes, encode_tokens(tokens))


def part_of(question, session, chunks=None):
    return prompt_part(session, question, question.handle_of(session, chunks))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1000, 200_000])
def test_common_bytes(length):
    rng = random.Random(length)
    a = encode_tokens([rng.randrange(5) for _ in range(length)])
    assert common_bytes(a, a + b"1234") == common_bytes(a + b"1234", a) == len(a)
    for at in {0, 1, length // 2, length - 2, length - 1}:
        if 0 <= at < length:
            b = bytearray(a + b"12345678")
            b[at * 4 + rng.randrange(4)] ^= 1
            assert common_bytes(a, bytes(b)) // 4 == at


def test_prompts_that_begin_alike_have_the_keys_they_would_have_anyway():
    rng = random.Random(1)
    remembered = PromptCache(16)
    prompts = [[]]
    for _ in range(300):
        stem = rng.choice(prompts)
        tokens = [
            *stem[: rng.randrange(len(stem) + 1)],
            *(rng.randrange(3) for _ in range(rng.randrange(60))),
        ]
        prompts.append(tokens)
        question = question_of(remembered, tokens)
        whole = Prompt(IDENTITY, tokens, chunk_tokens=16)
        assert question.keys == whole.keys
        cut = question.cut(rng.randrange(len(tokens) + 1))
        assert cut.keys == whole.keys[: cut.num_tokens // 16]
        assert cut.tokens_from(0) == encode_tokens(tokens[: cut.num_tokens])
        if rng.random() < 0.7:
            remembered.remember(cut if rng.random() < 0.3 else question, None)


def test_a_named_prefix_is_referred_to_and_not_spelled_out():
    remembered, session, other = PromptCache(16), Session(), Session()
    tokens = list(range(100))
    first = question_of(remembered, tokens)
    assert part_of(first, session).path == 0
    remembered.remember(first, PrefixHandle(session, 8, 5))
    again = question_of(remembered, [*tokens[:90], 1, 2, 3])
    part = part_of(again, session)
    assert (part.identity, part.path, part.known) == (3, 8, 5)
    assert part.tokens == encode_tokens([*tokens[80:90], 1, 2, 3])
    assert part.keys == b""
    assert part_of(again, session, 2).known == 2
    assert part_of(again, session, 0).path == 0
    assert part_of(again, other).path == 0
    short = question_of(remembered, [*tokens[:40], 7])
    assert (part_of(short, session).path, part_of(short, session).known) == (8, 2)
    again.forget_handle()
    assert part_of(question_of(remembered, tokens), session).path == 0


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("tierstore.store.prompts._MOST_PROMPTS", 10)
    monkeypatch.setattr("tierstore.store.prompts._MOST_BYTES", 4000)
    remembered = PromptCache(16)
    for n in range(100):
        remembered.remember(question_of(remembered, range(n, n + 20 + n)), None)
        assert len(remembered._order) <= 10
        assert remembered._nbytes <= 4000 or len(remembered._order) == 1
        assert sum(len(bucket) for bucket in remembered._buckets.values()) == len(remembered._order)
