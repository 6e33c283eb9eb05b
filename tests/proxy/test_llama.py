"""The decisions of ``tierstore llama``: which requests it restores, and into which slot."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from tierstore.errors import UsageError
from tierstore_connectors.llamacpp.blocks import BlockSettings
from tierstore_proxy.llama.requests import LlamaRequest, moves_cells
from tierstore_proxy.llama.settings import LlamaSettings
from tierstore_proxy.llama.slots import SlotBook

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def parse(path, document):
    return LlamaRequest.parse(path, json.dumps(document).encode())


def test_prompts_of_text_and_tokens():
    assert parse("completion", {"prompt": "Hello"}).text == "Hello"
    assert parse("v1/completions", {"prompt": [1, 2, 3]}).tokens.tolist() == [1, 2, 3]
    assert parse("v1/chat/completions", CHAT) is not None


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("embeddings", {"prompt": "Hello"}),
        ("infill", {"prompt": "Hello"}),
        ("completion", {"prompt": ["Hello", "you"]}),
        ("completion", {"prompt": [1, "you"]}),
        ("completion", {"prompt": [[1], [2]]}),
        ("completion", {"prompt": []}),
        ("completion", {"prompt": [-1]}),
        ("completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["…"]}}),
        ("completion", {}),
        ("completion", ["Hello"]),
        ("completion", {"prompt": "Hello", "cache_prompt": False}),
        ("completion", {"prompt": "Hello", "lora": [{"id": 0, "scale": 0.5}]}),
        ("completion", {"prompt": "Hello", "n_cache_reuse": 64}),
        ("completion", {"prompt": "Hello", "id_slot": "1"}),
        ("completion", {"prompt": "Hello", "n": 2}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": "Hello"}),
        ("chat/completions", {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "…"}}]}]}),
    ],
)
def test_requests_that_are_only_forwarded(path, document):
    assert parse(path, document) is None


def test_a_body_that_is_not_json():
    assert LlamaRequest.parse("completion", b"{") is None
    assert LlamaRequest.parse("completion", b"\xff") is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "temperature": 0.70, "seed": 18446744073709551615}',
        b' {"prompt":"a"} \n',
        b'{"prompt": "\\u00e9 }"}',
    ],
)
def test_only_the_slot_is_added(body):
    sent = LlamaRequest.parse("completion", body).sent_to(3)
    assert msgspec.json.decode(sent) == {**msgspec.json.decode(body), "id_slot": 3}
    assert sent.startswith(body.rstrip()[:-1])


def test_a_slot_that_the_client_names_stays():
    body = b'{"prompt": "a", "id_slot": 1}'
    request = LlamaRequest.parse("completion", body)
    assert (request.slot, request.sent_to(1)) == (1, body)
    anyone = LlamaRequest.parse("completion", b'{"prompt": "a", "id_slot": -1}')
    assert anyone.slot is None
    assert msgspec.json.decode(anyone.sent_to(2)) == {"prompt": "a", "id_slot": 2}


def test_requests_that_move_cells():
    assert moves_cells("slots/0", {"action": "restore"}, b"")
    assert not moves_cells("slots/0", {"action": "save"}, b"")
    assert moves_cells("completion", {}, b'{"n_cache_reuse": 8}')
    assert moves_cells("infill", {}, b'{"n\\u005fcache_reuse": 8}')
    assert not moves_cells("completion", {}, b'{"n_cache_reuse": 0}')
    assert not moves_cells("completion", {}, b'{"prompt": "n_cache_reuse"}')


def tokens(*ids):
    return np.array(ids, np.uint32)


def test_the_slot_with_the_longest_prefix_is_chosen():
    book = SlotBook(3)
    book.contains(book.slots[1], tokens(1, 2, 3, 4), 0)
    book.contains(book.slots[2], tokens(1, 2, 9), 0)
    assert book.choose(tokens(1, 2, 3, 4, 5), {0, 1, 2}).number == 1
    assert book.choose(tokens(1, 2, 3, 4, 5), {0, 2}).number == 2
    assert book.choose(tokens(1, 2, 3, 4, 5), set()) is None


def test_another_conversation_is_not_overwritten_for_a_few_tokens():
    book = SlotBook(2)
    book.contains(book.slots[0], tokens(*range(1, 50)), 0)
    book.take(book.slots[0])
    book.slots[0].busy = False
    assert book.choose(tokens(1, 2, *range(1000, 1100)), {0, 1}).number == 1


def test_a_slot_in_use_is_not_chosen():
    book = SlotBook(2)
    first = book.choose(tokens(1), {0, 1})
    book.take(first)
    second = book.choose(tokens(1), {0, 1})
    assert {first.number, second.number} == {0, 1}
    book.take(second)
    assert book.choose(tokens(1), {0, 1}) is None
    assert book.choose(tokens(1), {0, 1}, wanted=0) is None


def test_a_slot_that_others_have_used_is_unknown():
    book = SlotBook(1)
    slot = book.slots[0]
    for task, count, kept in [(7, 2, True), (7, 3, True), (8, 2, False), (7, 1, False), (None, 2, False)]:
        book.contains(slot, tokens(1, 2), 2)
        slot.task = 7
        book.compare(0, task, count)
        assert (len(slot.tokens) == 2) is kept


def test_tainted_slots_are_known_to_have_nothing():
    book = SlotBook(2)
    book.contains(book.slots[0], tokens(1, 2), 2)
    book.taint()
    assert all(slot.tainted and not len(slot.tokens) and not slot.held for slot in book.slots)
    book.emptied(book.slots[0])
    assert [slot.tainted for slot in book.slots] == [False, True]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "http://example.org:8080"}, "must be on this host"),
        ({"url": "localhost:8080"}, "must be http://HOST:PORT"),
        ({"listen": "0.0.0.0:80"}, "give llama-server's --api-key"),
        ({"listen": "80"}, "must be HOST:PORT"),
        ({"api_key": ""}, "must not be empty"),
    ],
)
def test_settings_that_are_refused(fields, message):
    given = {"url": "http://127.0.0.1:8080", "blocks": BlockSettings("ipc:///tmp/s"), **fields}
    with pytest.raises(UsageError, match=message):
        LlamaSettings(**given)
