"""Every list, map and string that is decoded from outside has a bound."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from tierstore.cluster import bundle_index, orders
from tierstore.packs import format as pack_format
from tierstore.wire import messages
from tierstore_engine.server import requests

_STRUCTS = (inspect.StructType, inspect.DataclassType, inspect.TypedDictType, inspect.NamedTupleType)
_LISTS = (inspect.ListType, inspect.SetType, inspect.FrozenSetType, inspect.VarTupleType)
_STRINGS = (inspect.StrType, inspect.BytesType, inspect.ByteArrayType, inspect.MemoryViewType)
_SIMPLE = (
    inspect.IntType,
    inspect.FloatType,
    inspect.BoolType,
    inspect.NoneType,
    inspect.LiteralType,
    inspect.EnumType,
)


def unbounded(kind: inspect.Type, place: str, seen: set[type]) -> Iterator[str]:
    """The places in a type that may hold any amount of data."""
    if isinstance(kind, _STRUCTS):
        if kind.cls not in seen:
            seen.add(kind.cls)
            for each in kind.fields:
                yield from unbounded(each.type, f"{kind.cls.__name__}.{each.name}", seen)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from unbounded(each, place, seen)
    elif isinstance(kind, inspect.TupleType):
        for each in kind.item_types:
            yield from unbounded(each, place, seen)
    elif isinstance(kind, _LISTS):
        if kind.max_length is None:
            yield f"{place} (a list)"
        yield from unbounded(kind.item_type, f"{place}[]", seen)
    elif isinstance(kind, inspect.DictType):
        if kind.max_length is None:
            yield f"{place} (a map)"
        yield from unbounded(kind.key_type, f"{place} (a key)", seen)
        yield from unbounded(kind.value_type, f"{place}[]", seen)
    elif isinstance(kind, _STRINGS):
        if kind.max_length is None:
            yield f"{place} (a string)"
    elif not isinstance(kind, _SIMPLE):
        yield f"{place} ({type(kind).__name__})"


HTTP = [
    each
    for each in vars(requests).values()
    if isinstance(each, type) and issubclass(each, msgspec.Struct) and each is not msgspec.Struct
]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(messages.Request, id="requests to a daemon"),
        pytest.param(messages.Answer, id="answers of a daemon"),
        pytest.param(orders.ToAgent, id="orders to an agent"),
        pytest.param(orders.ToDaemon, id="what an agent says"),
        pytest.param(orders.Origin, id="the origin of a bundle"),
        pytest.param(bundle_index.Uses, id="the uses of bundles"),
        pytest.param(pack_format._Index, id="the index of a pack"),
        *(pytest.param(each, id=f"HTTP {each.__name__}") for each in HTTP),
    ],
)
def test_every_field_is_bounded(kind):
    assert list(unbounded(inspect.type_info(kind), "", set())) == []


class Inner(msgspec.Struct):
    names: dict[str, list[bytes]]


class Outer(msgspec.Struct):
    inner: Inner | None = None
    anything: object = None


def test_a_field_without_a_bound_is_found():
    found = list(unbounded(inspect.type_info(Outer), "", set()))
    assert len(found) == 5


def test_a_prompt_of_a_million_tokens_passes():
    tokens = bytes(4 * (1 << 20))
    keys = bytes(16 * (1 << 20) // 16)
    lookup = messages.Find(1, messages.PromptPart(0, keys, tokens), 1 << 20, 1.0)
    assert messages.decode_request(messages.encode(lookup)) == lookup
    body = msgspec.json.encode({"model": "m", "prompt": [5] * (1 << 20)})
    assert len(requests.parse(body, requests.CompletionRequest).prompts[0]) == 1 << 20
    body = msgspec.json.encode({"model": "m", "prompt": "word " * (1 << 20)})
    assert requests.parse(body, requests.CompletionRequest).prompts[0].endswith("word ")
