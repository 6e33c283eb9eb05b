"""Tokenizers, and text that comes token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore_engine.errors import ModelError
from tierstore_engine.tokenizer import BOS_BYTE_ID, EOS_BYTE_ID, ByteTokenizer, HFTokenizer, Tokenizer

from .conftest import VOCAB, train_tokenizer


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer().save(str(folder / "tokenizer.json"))
    return HFTokenizer(folder)


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_there_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens[0] == BOS_BYTE_ID
    assert tokenizer.decode(tokens) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_character_is_never_shown_in_part(text: str) -> None:
    tokenizer = ByteTokenizer()
    shown = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(shown) == text
    assert all(piece == "" or len(piece) == 1 for piece in shown)


@given(st.lists(st.integers(0, 999)))
def test_any_bytes_stream_to_their_text(tokens: list[int]) -> None:
    tokenizer = ByteTokenizer()
    text = "".join(pieces(tokenizer, tokens))
    assert text == tokenizer.decode(tokens)
    if all(token < 256 for token in tokens):
        assert text == bytes(tokens).decode("utf-8", errors="replace")


def test_ids_beyond_the_bytes() -> None:
    assert ByteTokenizer().decode([65, EOS_BYTE_ID, 300, 66]) == "A<300>B"


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_hf_streams_to_the_whole_text(text: str, hf: HFTokenizer) -> None:
    tokens = hf.encode(text)
    shown = pieces(hf, tokens)
    assert "".join(shown) == hf.decode(tokens) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(shown)


@given(tokens=st.lists(st.integers(2, VOCAB - 1), max_size=60))
def test_hf_holds_back_a_few_tokens_at_most(tokens: list[int], hf: HFTokenizer) -> None:
    """Random tokens are mostly broken UTF-8: it must come out all the same."""
    detokenizer = hf.detokenizer()
    quiet = 0
    for token in tokens:
        quiet = 0 if detokenizer.push(token) else quiet + 1
        assert quiet < 8
    detokenizer.flush()


def test_special_tokens_are_silent(hf: HFTokenizer) -> None:
    shown = pieces(hf, [1, *hf.encode("the cat"), *[0] * 20, *hf.encode(" sat")])
    assert "".join(shown) == "the cat sat"


def test_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        HFTokenizer(tmp_path)
