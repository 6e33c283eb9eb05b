"""Vocabularies that are not in a ``tokenizer.json``: a SentencePiece ``tokenizer.model``, and the vocabulary
in a GGUF file. Both become a tokenizer of the tokenizers package.

SentencePiece's BPE always joins the two neighbours whose joined piece has the best score. The tokenizers
package does the same if every pair that forms a piece is a merge, ranked by the score of the piece.
SentencePiece models of other types, and those that rewrite texts before they are cut, are refused.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from tierstore.errors import SpecError
from tierstore.gguf import GGUFHeader
from tierstore.spec import read_json
from tierstore_engine.errors import ModelError

MODEL_FILE = "tokenizer.model"
CONFIG_FILE = "tokenizer_config.json"
ADDED_FILE = "added_tokens.json"

_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4  # kinds of pieces, also in GGUF
_BPE = 2  # a type of models
_SPACE = "▁"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _SMOLLM, _LLAMA3, _QWEN2 = "gpt-2", "smollm", "llama-bpe", "qwen2"
_GGML = "tokenizer.ggml."  # before the names of metadata about vocabularies


@dataclass(frozen=True)
class SentencePieces:
    """A SentencePiece vocabulary: the piece, score and kind of each id. ``begin`` and ``end`` are the ids at
    the ends of a prompt, or None. With ``prefix``, a space is put before a text. With ``prefix_parts``, a
    space is also put after each special token."""

    names: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unknown: int
    begin: int | None
    end: int | None
    byte_fallback: bool
    prefix: bool
    prefix_parts: bool = True
    added: tuple[tuple[int, AddedToken], ...] = ()


def read_vocabulary(folder: Path) -> FastTokenizer:
    """Return the tokenizer of a folder's ``tokenizer.model``. Special tokens and the tokens at the ends of a
    prompt are those of ``tokenizer_config.json`` and ``added_tokens.json``, if there are such files.

    Raises :class:`ModelError` for a file that is damaged, and for a model that would be cut differently.
    """
    file = folder / MODEL_FILE
    try:
        pieces = _of_model(file.read_bytes())
    except (OSError, IndexError, UnicodeDecodeError, ValueError, struct.error) as error:
        raise ModelError(f"{file} is not a readable SentencePiece model: {error}") from error
    return _tokenizer(file, _configured(pieces, folder))


def vocabulary_of_gguf(file: Path) -> FastTokenizer:
    """Return the tokenizer of the vocabulary in a GGUF file. Raises :class:`ModelError` for a vocabulary of a
    kind that is not read."""
    own = {
        name.removeprefix(_GGML): value for name, value in _metadata(file).items() if name.startswith(_GGML)
    }
    kind = own.get("model")
    lists = ("tokens", "token_type", "scores" if kind == "llama" else "merges")
    if kind not in ("llama", "gpt2"):
        raise ModelError(f"{file}: a vocabulary of kind {kind} is not read: give --tokenizer")
    for name in lists:
        if not isinstance(own.get(name), list):
            raise ModelError(f"{file} has no tokenizer.ggml.{name}: give --tokenizer")
    if not len(own["tokens"]) == len(own["token_type"]) == len(own.get("scores", own["tokens"])):
        raise ModelError(f"{file}: the lists of its vocabulary differ in length")
    return _of_spm(file, own) if kind == "llama" else _of_bpe(file, own)


@dataclass(frozen=True)
class GGUFTemplate:
    """The chat template in a GGUF file, with the tokens that it may name: ``bos_token`` and similar ones."""

    source: str
    special_tokens: Mapping[str, str]


def template_of_gguf(file: Path) -> GGUFTemplate | None:
    """Return the chat template in a GGUF file, None without one. Raises :class:`ModelError` for a file that
    is damaged."""
    fields = _metadata(file)
    source, tokens = fields.get("tokenizer.chat_template"), fields.get(f"{_GGML}tokens") or []
    if not isinstance(source, str):
        return None
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = fields.get(f"{_GGML}{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            special[f"{name}_token"] = tokens[token]
    return GGUFTemplate(source, special)


def _metadata(file: Path) -> Mapping[str, Any]:
    """Return the metadata of a GGUF file, with its lists."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return dict(GGUFHeader(data, lists=True).fields())
    except (OSError, OverflowError, ValueError, struct.error) as error:
        raise ModelError(f"{file} is not a readable GGUF file: {error}") from error


# -- SentencePiece -------------------------------------------------------------------------------------


def _of_model(data: bytes) -> SentencePieces:
    """Return the vocabulary of a ``tokenizer.model``, which is a message of protobuf."""
    pieces: list[tuple[str, float, int]] = []
    trainer: Mapping[int, Any] = {}
    rules: Mapping[int, Any] = {}
    for number, value in _message(data):
        if number == 1:
            piece = dict(_message(value))
            pieces.append((piece[1].decode(), piece.get(2, 0.0), piece.get(3, _NORMAL)))
        elif number == 2:
            trainer = dict(_message(value))
        elif number == 3:
            rules = dict(_message(value))
    if not pieces:
        raise ValueError("it has no pieces")
    if trainer.get(3, 1) != _BPE:
        raise ValueError("only models of type BPE are supported")
    for refused, what in (
        (rules.get(2), "a normalization rule"),
        (rules.get(4, 1), "remove_extra_whitespaces"),
        (not rules.get(5, 1), "escape_whitespaces = false"),
        (trainer.get(24), "treat_whitespace_as_suffix"),
    ):
        if refused:
            raise ValueError(f"{what} is not supported")
    ids = [_signed(trainer.get(number, default)) for number, default in ((40, 0), (41, 1), (42, 2))]
    names, scores, kinds = zip(*pieces, strict=True)
    return SentencePieces(
        names,
        scores,
        kinds,
        unknown=ids[0],
        begin=ids[1] if ids[1] >= 0 else None,
        end=None,
        byte_fallback=bool(trainer.get(35, 0)),
        prefix=bool(rules.get(3, 1)),
    )


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message of protobuf: their numbers and values."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
        elif wire == 2:
            length = varint()
            if at + length > len(data):
                raise ValueError("the message ends within a field")
            yield number, data[at : at + length]
            at += length
        elif wire in (1, 5):
            [value] = struct.unpack_from("<d" if wire == 1 else "<f", data, at)
            at += 8 if wire == 1 else 4
            yield number, value
        else:
            raise ValueError(f"field {number} is of an unknown form")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _configured(pieces: SentencePieces, folder: Path) -> SentencePieces:
    """Return the vocabulary, changed by the tokens that other files in the folder add or rename."""
    settings, more = (_json_of(folder / name) for name in (CONFIG_FILE, ADDED_FILE))
    names, added = list(pieces.names), {}
    for content, token in more.items():
        added[int(token)] = AddedToken(content, normalized=False)
    for token, each in (settings.get("added_tokens_decoder") or {}).items():
        fields = {name: bool(each.get(name)) for name in ("lstrip", "rstrip", "single_word", "special")}
        added[int(token)] = AddedToken(each["content"], normalized=bool(each.get("normalized")), **fields)
    for token, each in added.items():
        if token < len(names):
            names[token] = each.content
    by_name = {name: token for token, name in enumerate(names)}
    by_name |= {each.content: token for token, each in added.items()}

    def end_of(kind: str, default: int | None, *, wanted: bool) -> int | None:
        given = settings.get(f"{kind}_token")
        name = given.get("content") if isinstance(given, Mapping) else given
        token = by_name.get(name, default) if name is not None else default
        return token if settings.get(f"add_{kind}_token", wanted) else None

    return replace(
        pieces,
        names=names,
        added=tuple(sorted(added.items())),
        begin=end_of("bos", pieces.begin, wanted=True),
        end=end_of("eos", pieces.end, wanted=False),
        prefix_parts=bool(settings.get("legacy", True)),
    )


def _json_of(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        return read_json(file)
    except SpecError as error:
        raise ModelError(str(error)) from error


def _tokenizer(file: Path, pieces: SentencePieces) -> FastTokenizer:
    user = [name for name, kind in zip(pieces.names, pieces.kinds, strict=True) if kind == _USER]
    fast = FastTokenizer(
        models.BPE(
            vocab={name: token for token, name in enumerate(pieces.names)},
            merges=_merges(pieces),
            unk_token=pieces.names[pieces.unknown],
            fuse_unk=True,
            byte_fallback=pieces.byte_fallback,
            ignore_merges=bool(user),  # a user-defined piece is never cut
        )
    )
    escape = normalizers.Replace(" ", _SPACE)
    cuts: list[Any] = []
    if pieces.prefix and pieces.prefix_parts:
        fast.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape])
    else:
        fast.normalizer = escape
        if pieces.prefix:
            cuts.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    if user:
        any_of = "|".join(map(re.escape, sorted(user, key=len, reverse=True)))
        cuts.append(pre_tokenizers.Split(Regex(any_of), "isolated"))
    if cuts:
        fast.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if pieces.prefix else [])])
    special = {
        token: AddedToken(name, special=True, normalized=False)
        for token, (name, kind) in enumerate(zip(pieces.names, pieces.kinds, strict=True))
        if kind in (_CONTROL, _UNKNOWN)
    }
    _add(file, fast, {**special, **dict(pieces.added)})
    _frame(fast, pieces.begin, pieces.end)
    return fast


def _merges(pieces: SentencePieces) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form another piece. Pairs for the piece with the best score come
    first."""
    normal = {
        name: (-score, token)
        for token, (name, score, kind) in enumerate(
            zip(pieces.names, pieces.scores, pieces.kinds, strict=True)
        )
        if kind == _NORMAL
    }
    ranked = [
        (rank, name[:cut], name[cut:])
        for name, rank in normal.items()
        for cut in range(1, len(name))
        if name[:cut] in normal and name[cut:] in normal
    ]
    return [(left, right) for _, left, right in sorted(ranked, key=lambda each: each[0])]


def _add(file: Path, fast: FastTokenizer, added: Mapping[int, AddedToken]) -> None:
    for token, each in sorted(added.items()):
        fast.add_special_tokens([each]) if each.special else fast.add_tokens([each])
        if fast.token_to_id(each.content) != token:
            raise ModelError(f"{file}: the added token {each.content!r} cannot have the id {token}")


def _frame(fast: FastTokenizer, begin: int | None, end: int | None) -> None:
    """Make the tokenizer put these tokens at the beginning and the end of prompts."""
    ends = [None if token is None else fast.id_to_token(token) for token in (begin, end)]
    if any(ends):
        fast.post_processor = processors.TemplateProcessing(
            single=[each for each in (ends[0], "$A", ends[1]) if each],
            special_tokens=[(each, fast.token_to_id(each)) for each in ends if each],
        )


# -- GGUF ----------------------------------------------------------------------------------------------


def _of_spm(file: Path, own: Mapping[str, Any]) -> FastTokenizer:
    if own.get("precompiled_charsmap") or own.get("remove_extra_whitespaces"):
        raise ModelError(f"{file}: its vocabulary rewrites texts, which is not supported: give --tokenizer")
    pieces = SentencePieces(
        own["tokens"],
        own["scores"],
        own["token_type"],
        unknown=own.get("unknown_token_id", 0),
        begin=own.get("bos_token_id", 1) if own.get("add_bos_token", True) else None,
        end=own.get("eos_token_id", 2) if own.get("add_eos_token", False) else None,
        byte_fallback=True,
        prefix=own.get("add_space_prefix", True),
    )
    return _tokenizer(file, pieces)


def _of_bpe(file: Path, own: Mapping[str, Any]) -> FastTokenizer:
    cut = own.get("pre")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    cuts: Mapping[Any, list[Any]] = {
        _GPT2: [words],
        _SMOLLM: [digits, words],
        _LLAMA3: [pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated"), bytes_only],
        _QWEN2: [pre_tokenizers.Split(Regex(_WORDS % ""), "isolated"), bytes_only],
    }
    if cut not in cuts:
        raise ModelError(
            f"{file}: a vocabulary that cuts texts like {cut} is not read ({', '.join(cuts)} are): "
            "give --tokenizer"
        )
    merges = [tuple(each.split(" ", 1)) for each in own["merges"]]
    vocabulary = {name: token for token, name in enumerate(own["tokens"])}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == _LLAMA3))
    if cut == _QWEN2:
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(cuts[cut])
    fast.decoder = decoders.ByteLevel()
    added = {
        token: AddedToken(name, special=kind == _CONTROL, normalized=False)
        for token, (name, kind) in enumerate(zip(own["tokens"], own["token_type"], strict=True))
        if kind in (_CONTROL, _USER)
    }
    _add(file, fast, added)
    begin = own.get("bos_token_id") if own.get("add_bos_token", cut == _LLAMA3) else None
    _frame(fast, begin, own.get("eos_token_id") if own.get("add_eos_token") else None)
    return fast
