"""``tokenizer.model`` as SentencePiece reads it, and the vocabulary of a GGUF file."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders as fast_decoders

from tests.tiny_models import train_tokenizer
from tierstore_engine.errors import ModelError
from tierstore_engine.fetch import write_tokenizer
from tierstore_engine.tokenizer import HFTokenizer, Tokenizer
from tierstore_engine.vocabularies import vocabulary_of_gguf

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(st.sampled_from("abcde  ▁é\n<>"))
CORPUS = ["the cat sat on the mat", "abc abd  bcd ecab éa", "日本語 the dog", "a  b   c\nd\te"] * 20


# -- a file that is written here -------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value %= 1 << 64
    out = b""
    while value > 127:
        out += bytes((value & 127 | 128,))
        value >>= 7
    return out + bytes((value,))


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


LETTERS = {"▁": -5.0, **dict.fromkeys("catdoge", -9.0)}
WORDS = {"ca": -1.0, "cat": -2.0, "▁cat": -3.0, "do": -4.0, "dog": -6.0, "▁dog": -7.0}
BYTES = {f"<0x{byte:02X}>": 6 for byte in range(256)}
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3}


def write_model(folder: Path, *, rules: bytes = b"", trainer: bytes = b"", **config: Any) -> Path:
    """Like Llama 2's vocabulary, with a few words."""
    kinds = {**SPECIAL, **BYTES, **dict.fromkeys((*LETTERS, *WORDS), 1)}
    scores = {**LETTERS, **WORDS}
    data = b""
    for name, kind in kinds.items():
        data += field(1, field(1, name.encode()) + field(2, scores.get(name, 0.0)) + field(3, kind))
    data += field(2, field(3, 2) + field(35, 1) + field(42, -1) + trainer)
    data += field(3, field(1, b"identity") + field(3, 1) + field(4, 0) + rules)
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def names(tokenizer: HFTokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer._fast.id_to_token(each) for each in tokenizer.encode(text, **options)]


def test_words_bytes_and_the_space_before_a_text(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write_model(tmp_path))
    assert names(tokenizer, "cat dog") == ["<s>", "▁cat", "▁dog"]
    assert names(tokenizer, " cat", begin=False) == ["▁", "▁cat"]
    assert names(tokenizer, "cé", begin=False) == ["▁", "c", "<0xC3>", "<0xA9>"]
    assert names(tokenizer, "cat</s>dog", begin=False) == ["▁cat", "</s>", "▁dog"]
    for text in ("cat dog", " cat", "cé cat", "日本"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_configuration_beside_it(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path,
        add_bos_token=False,
        add_eos_token=True,
        legacy=False,
        eos_token={"content": "<turn>"},
        added_tokens_decoder={
            "2": {"content": "<turn>", "special": True},
            "272": {"content": "<image>", "special": False},
        },
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<later>": 273}))
    tokenizer = HFTokenizer(folder)
    assert names(tokenizer, "cat<turn>cat") == ["▁cat", "<turn>", "cat", "<turn>"]
    assert tokenizer.encode("<image><later>", begin=False) == [272, 273]
    assert tokenizer.decode([tokenizer.encode("cat", begin=False)[0], 2, 272]) == "cat<image>"


def test_text_that_comes_token_by_token(tmp_path: Path) -> None:
    """As a whole, after any prompt: the space before a text is dropped at its beginning only."""
    tokenizer = HFTokenizer(write_model(tmp_path))
    tokens = tokenizer.encode("cat dog é日 cat", begin=False)
    for cut in range(len(tokens) + 1):
        if tokenizer.decode(tokens[:cut]).endswith("\ufffd"):
            continue  # within a character
        detokenizer = tokenizer.detokenizer(tokens[:cut])
        text = "".join(map(detokenizer.push, tokens[cut:])) + detokenizer.flush()
        assert tokenizer.decode(tokens).endswith(text)
        if not cut:
            assert text == "cat dog é日 cat"
    assert tokenizer.token_bytes(tokens[1]) == b" dog"
    assert [tokenizer.token_bytes(each) for each in tokenizer.encode("é", begin=False)[1:]] == [
        b"\xc3",
        b"\xa9",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": field(3, 1)}, "only models of type BPE"),
        ({"rules": field(2, b"rule")}, "a normalization rule is not supported"),
        ({"rules": field(4, 1)}, "remove_extra_whitespaces is not supported"),
        ({"rules": field(5, 0)}, "escape_whitespaces = false is not supported"),
        ({"trainer": field(24, 1)}, "treat_whitespace_as_suffix"),
        ({"added_tokens_decoder": {"300": {"content": "far"}}}, "'far' cannot have the id 300"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        HFTokenizer(write_model(tmp_path, **change))


@pytest.mark.parametrize("damage", [b"", b"\x0a\xff", b"\x0b", b"nothing", b"\x0a"])
def test_damaged_files(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(damage)
    with pytest.raises(ModelError, match="not a readable SentencePiece model") as caught:
        HFTokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    write_model(tmp_path)
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert HFTokenizer(tmp_path).encode("the cat") == train_tokenizer().encode("the cat").ids


# -- files that SentencePiece has trained ----------------------------------------------------------------

TRAINED: dict[str, dict[str, Any]] = {
    "llama": {"byte_fallback": True},
    "gemma": {"byte_fallback": True, "add_dummy_prefix": False, "user_defined_symbols": ["  ", "\n", "cab"]},
    "unknown": {},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Tokenizer]]:
    """Trains a model: SentencePiece's processor, and the tokenizer of the same file."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs pip install -e '.[dev]'")
    made: dict[str, tuple[Any, Tokenizer]] = {}

    def make(name: str) -> tuple[Any, Tokenizer]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            options = TRAINED[name]
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(CORPUS),
                model_prefix=str(folder / "tokenizer"),
                model_type="bpe",
                vocab_size=320 if options.get("byte_fallback") else 60,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                hard_vocab_limit=False,
                minloglevel=2,
                **options,
            )
            made[name] = (
                sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")),
                HFTokenizer(folder),
            )
        return made[name]

    return make


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=300)
@given(text=TEXTS)
def test_the_same_ids_as_sentencepiece(
    name: str, text: str, trained: Callable[[str], tuple[Any, Tokenizer]]
) -> None:
    processor, tokenizer = trained(name)
    if re.search(r"</?(s|unk)>|\0", text):
        return  # special tokens in a text are read as in transformers
    ids = processor.encode(text)
    assert tokenizer.encode(text, begin=False) == ids
    assert tokenizer.encode(text) == [processor.bos_id(), *ids]
    if processor.unk_id() not in ids:
        assert tokenizer.decode(ids) == processor.decode(ids)


# -- GGUF ------------------------------------------------------------------------------------------------


def write_vocabulary(file: Path, kind: str, *, template: str | None = None, **fields: Any) -> Path:
    """A GGUF file with a vocabulary, and perhaps a chat template, and nothing else."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(kind)
    if template is not None:
        writer.add_chat_template(template)
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_sentencepiece_vocabulary_in_gguf(tmp_path: Path) -> None:
    kinds = {**SPECIAL, **BYTES, **dict.fromkeys((*LETTERS, *WORDS), 1)}
    scores = {**LETTERS, **WORDS}
    file = write_vocabulary(
        tmp_path / "m.gguf",
        "llama",
        tokens=list(kinds),
        scores=[scores.get(name, 0.0) for name in kinds],
        token_type=list(kinds.values()),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    of_gguf, of_model = HFTokenizer(vocabulary_of_gguf(file)), HFTokenizer(write_model(tmp_path))
    for text in ("cat dog", " cat", "cé cat", "日本", "cat</s>dog", ""):
        assert of_gguf.encode(text) == of_model.encode(text)
        assert of_gguf.decode(of_gguf.encode(text)) == of_model.decode(of_model.encode(text))


def bpe(cut: Any) -> FastTokenizer:
    """A byte-level BPE that cuts texts in this way, as in a ``tokenizer.json``."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = fast_decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, "1234 don't 12a"] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def gguf_of(file: Path, original: FastTokenizer, pre: str, **fields: Any) -> Path:
    model = json.loads(original.to_str())["model"]
    tokens = [original.id_to_token(each) for each in range(original.get_vocab_size())]
    kinds = [3 if name in ("<s>", "</s>") else 4 if name == "<tool>" else 1 for name in tokens]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return write_vocabulary(file, "gpt2", pre=pre, tokens=tokens, token_type=kinds, merges=merges, **fields)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_a_byte_level_vocabulary_in_gguf(pre: str, tmp_path: Path) -> None:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    original = bpe(words if pre == "gpt-2" else pre_tokenizers.Sequence([digits, words]))
    found = vocabulary_of_gguf(gguf_of(tmp_path / "m.gguf", original, pre))

    @given(TEXTS | st.text(st.sampled_from("the cat 12don't<tool></s>\n ")))
    def check(text: str) -> None:
        assert found.encode(text).ids == original.encode(text).ids
        assert HFTokenizer(found).decode(found.encode(text).ids) == original.decode(original.encode(text).ids)

    check()


def test_the_chat_template_in_gguf(tmp_path: Path) -> None:
    """It is used if the folder has none, with the names of the file's own tokens."""
    chat = pytest.importorskip("tierstore_engine.server.chat")
    message = chat.ChatMessage(role="user", content="cat")
    original = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    file = gguf_of(tmp_path / "a.gguf", original, "gpt-2", bos_token_id=0, eos_token_id=1)
    assert chat.load_template(tmp_path, gguf=file) is None
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    file = gguf_of(tmp_path / "b.gguf", original, "gpt-2", bos_token_id=0, eos_token_id=1, template=template)
    assert chat.load_template(tmp_path, gguf=file).render([message]) == "<s>cat</s>"
    (tmp_path / "chat_template.jinja").write_text("of the folder")
    assert chat.load_template(tmp_path, gguf=file).render([message]) == "of the folder"


def test_a_fetched_model_cuts_numbers_as_its_gguf_file_says(tmp_path: Path) -> None:
    """SmolLM2's vocabulary takes digits one by one. transformers 5.24 converts it without that."""
    words, digits = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(True)
    bpe(words).save(str(tmp_path / "tokenizer.json"))
    assert "34" in names(HFTokenizer(tmp_path), "a 1234")
    write_tokenizer(gguf_of(tmp_path / "m.gguf", bpe(words), "smollm"), tmp_path)
    original = bpe(words)
    original.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    assert HFTokenizer(tmp_path).encode("a 1234") == original.encode("a 1234").ids


def test_the_ends_of_a_prompt_in_gguf(tmp_path: Path) -> None:
    original = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    asked = {"add_bos_token": True, "add_eos_token": True}
    plain = HFTokenizer(vocabulary_of_gguf(gguf_of(tmp_path / "a.gguf", original, "gpt-2", **ends)))
    framed = HFTokenizer(vocabulary_of_gguf(gguf_of(tmp_path / "b.gguf", original, "gpt-2", **ends, **asked)))
    ids = original.encode("the cat").ids
    assert plain.encode("the cat") == ids
    assert framed.encode("the cat") == [0, *ids, 1]
    assert framed.encode("the cat", begin=False) == ids


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("bert", {}, "a vocabulary of kind bert is not read: give --tokenizer"),
        ("gpt2", {"tokens": ["a"], "token_type": [1]}, r"has no tokenizer\.ggml\.merges"),
        (
            "gpt2",
            {"tokens": ["a"], "token_type": [1], "merges": ["a b"], "pre": "other"},
            "like other",
        ),
        ("llama", {"tokens": ["a"], "token_type": [1], "scores": [1.0, 2.0]}, "differ in length"),
    ],
)
def test_vocabularies_that_are_refused(tmp_path: Path, kind: str, fields: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        vocabulary_of_gguf(write_vocabulary(tmp_path / "m.gguf", kind, **fields))
