"""Where requests go, as arithmetic; and what is remembered of where they went."""

from __future__ import annotations

import doctest
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore_engine.server.errors import ApiError
from tierstore_proxy import choice, prompts, residency
from tierstore_proxy.choice import EngineLoad, rank_decode, rank_prefill
from tierstore_proxy.prompts import Api, Asked, RoutedPrompt
from tierstore_proxy.residency import SentPrompts

LOADS = st.lists(
    st.builds(EngineLoad, st.integers(0, 9), st.integers(0, 9000), st.booleans()), min_size=1, max_size=6
)


@pytest.mark.parametrize("module", [choice, prompts, residency])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


@given(LOADS, st.integers(0, 99))
def test_a_prefill_engine_that_is_up_with_the_shortest_queue(loads, turn):
    ranked = rank_prefill(loads, turn)
    assert sorted(ranked) == [index for index, load in enumerate(loads) if load.up]
    assert [loads[index].tokens for index in ranked] == sorted(load.tokens for load in loads if load.up)


@given(LOADS, st.data(), st.integers(0, 9000), st.integers(0, 99))
def test_a_decode_engine_with_the_least_to_do(loads, data, tokens, turn):
    held = [data.draw(st.integers(0, tokens)) for _ in loads]
    ranked = rank_decode(loads, held, tokens, turn)
    up = [index for index, load in enumerate(loads) if load.up] or [*range(len(loads))]
    assert sorted(ranked) == up
    assert loads[ranked[0]].tokens - held[ranked[0]] == min(loads[at].tokens - held[at] for at in up)


def test_equals_take_turns():
    assert [rank_decode([EngineLoad(0, 0)] * 3, [0] * 3, 10, turn)[0] for turn in range(4)] == [0, 1, 2, 0]


@given(st.binary(max_size=2000), st.binary(max_size=600), st.binary(max_size=600))
def test_what_was_sent_is_remembered_as_far_as_prompts_are_the_same(common, one, other):
    sent = SentPrompts(2)
    sent.note(RoutedPrompt(None, common + one), 1)
    same = next(
        (
            at
            for at, (mine, yours) in enumerate(zip(common + one, common + other, strict=False))
            if mine != yours
        ),
        min(len(common + one), len(common + other)),
    )
    assert sent.held(RoutedPrompt(None, common + other)) == [0, same // 256 * 64]


def test_a_conversation_that_goes_on_begins_like_itself():
    turns = [{"role": "user", "content": "x" * 3000}, {"role": "assistant", "content": "y"}]
    first, second = (
        Asked.parse(Api.CHAT, json.dumps({"messages": turns[:count]}).encode()).prompt for count in (1, 2)
    )
    assert first is not None
    assert second is not None
    assert second.text.startswith(first.text)


def test_token_ids_in_both_forms_are_one_prompt():
    for prompt in ([1, 2, 3], [[1, 2, 3]]):
        asked = Asked.parse(Api.COMPLETIONS, json.dumps({"prompt": prompt}).encode())
        assert asked.prompt is not None
        np.testing.assert_array_equal(asked.prompt.tokens, [1, 2, 3])
    for prompt in (["a", "b"], [[1], [2]], [-1], [1.5], {"a": 1}, None, []):
        assert Asked.parse(Api.COMPLETIONS, json.dumps({"prompt": prompt}).encode()).prompt is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(ApiError, match="JSON") as refused:
        Asked.parse(Api.COMPLETIONS, body)
    assert refused.value.status == 400


def test_the_two_requests_of_a_hand_over():
    body = {
        "model": "m",
        "prompt": "a",
        "max_tokens": 50,
        "min_tokens": 3,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "kv_transfer_params": {"tierstore": {"reuse": "likely"}, "do_remote_prefill": True},
    }
    asked = Asked.parse(Api.COMPLETIONS, json.dumps(body).encode())
    assert json.loads(asked.prefill_body) == {
        "model": "m",
        "prompt": "a",
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "temperature": 0.5,
        "kv_transfer_params": {
            "tierstore": {"reuse": "likely"},
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert asked.decode_body(None) == asked.body, "the very bytes"
    answered = {"do_remote_prefill": True, "tierstore": {"tokens": 64, "until_s": 1.0}}
    assert json.loads(asked.decode_body(answered)) == {
        **body,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "tierstore": {"reuse": "likely", "tokens": 64, "until_s": 1.0},
        },
    }
    theirs = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_host": "h"}
    plain = Asked.parse(Api.CHAT, b'{"messages": [], "max_completion_tokens": 9}')
    assert json.loads(plain.decode_body(theirs))["kv_transfer_params"] == theirs, (
        "of another connector: as it is"
    )
    assert json.loads(plain.prefill_body)["max_completion_tokens"] == 1
