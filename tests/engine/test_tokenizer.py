"""Tokenizers, and text that comes token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from tests.tiny_models import VOCAB, train_tokenizer
from tierstore_engine.errors import ModelError
from tierstore_engine.tokenizer import BOS_BYTE_ID, EOS_BYTE_ID, ByteTokenizer, HFTokenizer, Tokenizer


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer().save(str(folder / "tokenizer.json"))
    return HFTokenizer(folder)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """Like Llama 2's: words begin with ``▁``, characters that it has not are bytes, and the first space of a
    text is dropped."""
    words = ["▁", *"catdogse", "ca", "cat", "▁cat", "do", "dog", "▁dog"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat"), ("d", "o"), ("do", "g"), ("▁", "dog")]
    vocabulary = {name: at for at, name in enumerate(names)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    folder = tmp_path_factory.mktemp("spm")
    fast.save(str(folder / "tokenizer.json"))
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


def check_starts(tokenizer: Tokenizer, tokens: list[int], before: list[int]) -> str:
    """Every token that is whole characters is in the text where it is said to begin. The text."""
    detokenizer = tokenizer.detokenizer(before)
    text = "".join([*map(detokenizer.push, tokens), detokenizer.flush()])
    starts = detokenizer.starts
    assert len(starts) == len(tokens)
    assert starts == sorted(starts)
    for token, start in zip(tokens, starts, strict=True):
        alone = tokenizer.token_text(token)
        if "\N{REPLACEMENT CHARACTER}" not in alone:
            assert text[start : start + len(alone)] == alone
    return text


@given(st.lists(st.integers(0, 300) | st.sampled_from([0xED, 0xB3, 0xE2, 0x82, 0xF0, 0x9F]), max_size=40))
def test_bytes_begin_where_they_are(tokens: list[int]) -> None:
    check_starts(ByteTokenizer(), tokens, [])


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_begin_where_they_are(text: str, hf: HFTokenizer, spm: HFTokenizer) -> None:
    assert check_starts(hf, hf.encode(text), []) == text
    before = spm.encode("cat")
    assert check_starts(spm, spm.encode(f"cat {text}")[len(before) :], before) == f" {text}"


def test_tokens_of_one_character_begin_with_it(spm: HFTokenizer) -> None:
    euro = [3 + byte for byte in "€".encode()]
    detokenizer = spm.detokenizer(spm.encode("cat"))
    tokens = [*spm.encode("dog"), *euro, *spm.encode("cat")]
    assert "".join(map(detokenizer.push, tokens)) == " dog€ cat"
    assert detokenizer.starts == [0, 4, 4, 4, 5]


@pytest.mark.parametrize("special", [0, 1, 7, 8, 9, 40])
def test_a_text_that_goes_on_keeps_its_first_space(special: int, spm: HFTokenizer) -> None:
    """However many tokens without text the prompt ends with."""
    prompt, more = [1, *spm.encode("dog"), *[2] * special], spm.encode("cat")
    detokenizer = spm.detokenizer(prompt)
    shown = "".join([*map(detokenizer.push, more), detokenizer.flush()])
    assert spm.decode(prompt) + shown == spm.decode([*prompt, *more]) == "dog cat"
    detokenizer = spm.detokenizer([1])
    assert "".join([*map(detokenizer.push, more), detokenizer.flush()]) == "cat", "nothing comes before it"


def test_every_token_has_its_bytes(hf: HFTokenizer, spm: HFTokenizer) -> None:
    assert [spm.token_bytes(token) for token in spm.encode("cat dog")] == [b" cat", b" dog"]
    assert [spm.token_bytes(3 + byte) for byte in range(256)] == [bytes((byte,)) for byte in range(256)]
    assert {spm.token_bytes(token) for token in (0, 1, 2, 10**6)} == {b""}
    for tokenizer, text in ((hf, "the cat sat €, é and 🙂\n"), (spm, "cat € 🙂")):
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert joined.decode().removeprefix(" ") == text


def test_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        HFTokenizer(tmp_path)
