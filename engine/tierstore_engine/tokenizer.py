"""Convert text to token ids and back, with a checkpoint's vocabulary, or as bytes for models without one."""

from __future__ import annotations

import codecs
import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from tierstore_engine.errors import ModelError
from tierstore_engine.vocabularies import MODEL_FILE, read_vocabulary

BOS_BYTE_ID = 256
EOS_BYTE_ID = 257
BYTE_VOCAB_SIZE = 258

_FILE = "tokenizer.json"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 8


class Detokenizer(ABC):
    """Convert one sequence's tokens to text as they arrive, without showing partial characters.

    ``starts`` has the position of each token whose text was shown, in characters of the whole text. Tokens
    that make up one character begin at that character.
    """

    starts: list[int]

    @abstractmethod
    def push(self, token: int) -> str:
        """Add a token. Add tokens, and return the new text that later tokens cannot change. It may be
        empty."""

    @abstractmethod
    def flush(self) -> str:
        """Return the text that is still held back at the end, with replacement characters for incomplete
        characters."""

    @abstractmethod
    def copy(self) -> Detokenizer:
        """Return a detokenizer in the same state, for a sequence that continues independently."""


class Tokenizer(ABC):
    """One model's vocabulary."""

    @abstractmethod
    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Return the ids of ``text``. Unless ``begin`` is False, they start with the special tokens that the
        model expects at a prompt's start. A chat template already writes these tokens."""

    @abstractmethod
    def starts(self, text: str, *, begin: bool = True) -> list[int]:
        """Return where each token of :meth:`encode` begins in ``text``, in characters. Tokens that are parts
        of one character begin at that character."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without special tokens."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds inside a text: none for a special token, and some bytes of the
        character for a token that is part of one."""

    def written(self, token: int) -> str | None:
        """Return how an added token, such as a special one, is written in a text. None for other tokens."""
        return None

    def token_text(self, token: int) -> str:
        """Return the text that a token adds within a text. Parts of characters become replacement
        characters."""
        return self.token_bytes(token).decode(errors="replace")

    @abstractmethod
    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        """Return a new detokenizer, for text that follows the tokens ``before``."""


class ByteTokenizer(Tokenizer):
    """A tokenizer with one id per byte of UTF-8, and ids for begin and end of sequence after these. Further
    ids (a preset may have a larger vocabulary) are shown as ``<id>``."""

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        return [*((BOS_BYTE_ID,) if begin else ()), *text.encode("utf-8", errors="replace")]

    def starts(self, text: str, *, begin: bool = True) -> list[int]:
        sizes = (len(character.encode("utf-8", errors="replace")) for character in text)
        return [*((0,) if begin else ()), *(at for at, size in enumerate(sizes) for _ in range(size))]

    def decode(self, tokens: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < 256 else self.decode([token]).encode()

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        return _ByteDetokenizer()


class HFTokenizer(Tokenizer):
    """The ``tokenizer.json`` or ``tokenizer.model`` of a folder, or a tokenizer of the tokenizers package.
    Raises :class:`ModelError` if the files are missing or cannot be read."""

    def __init__(self, source: Path | FastTokenizer) -> None:
        self._fast = _read(source) if isinstance(source, Path) else source
        added = self._fast.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = {token for token, each in added.items() if each.special}
        kinds = _kinds(json.loads(self._fast.to_str())["decoder"])
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=begin).ids)

    def starts(self, text: str, *, begin: bool = True) -> list[int]:
        return [start for start, _ in self._fast.encode(text, add_special_tokens=begin).offsets]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._fast.decode(list(tokens)))

    def written(self, token: int) -> str | None:
        return self._fast.id_to_token(token) if token in self._added else None

    def token_bytes(self, token: int) -> bytes:
        piece = self._fast.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        if self._byte_level:
            in_bytes = all(character in _BYTES for character in piece)
            return bytes(map(_BYTES.__getitem__, piece)) if in_bytes else piece.encode()
        if self._byte_fallback and _BYTE_PIECE.fullmatch(piece):
            return bytes((int(piece[3:5], 16),))
        # Some decoders treat the first token of a text differently. The second token is decoded as it is
        # inside a text.
        return self.decode([token, token])[len(self.decode([token])) :].encode()

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        return _WindowDetokenizer(self, self._context(before))

    def _context(self, before: Sequence[int]) -> list[int]:
        """Return the last of the tokens ``before`` that have text, up to the end of a character."""
        count = _MAX_HELD_TOKENS
        while True:
            context = list(before[-count:])
            while context and (text := self.decode(context)).endswith(_REPLACEMENT):
                context.pop()
            if (context and text) or count >= len(before):
                return context
            count *= 2


def has_vocabulary(folder: Path) -> bool:
    """Return whether a folder has a file that :class:`HFTokenizer` reads."""
    return any((folder / name).is_file() for name in (_FILE, MODEL_FILE))


def _read(folder: Path) -> FastTokenizer:
    file = folder / _FILE
    if not file.is_file():
        if not has_vocabulary(folder):
            raise ModelError(f"{folder} has neither {_FILE} nor {MODEL_FILE}")
        return read_vocabulary(folder)
    try:
        return FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a bad file
        raise ModelError(f"{file} is not a readable tokenizer: {error}") from error


def common_length(one: str, other: str) -> int:
    """Return how many leading characters two texts have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices is as fast as reading memory
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _kinds(decoder: object) -> set[str]:
    """Return the types of a decoder in ``tokenizer.json`` and of the decoders inside it."""
    if not isinstance(decoder, dict):
        return set()
    parts = (_kinds(each) for each in decoder.get("decoders", ()))
    return {str(decoder.get("type"))}.union(*parts)


def _byte_characters() -> dict[str, int]:
    """Return the bytes by the characters that represent them in a byte-level vocabulary (as in GPT-2).
    A printable byte is represented by the same character. The other bytes are represented by the characters
    from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class _ByteDetokenizer(Detokenizer):
    def __init__(self) -> None:
        self.starts = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown = 0

    def push(self, token: int) -> str:
        if token >= 256:
            text = self._decoded(b"", final=True)
            self.starts.append(self._shown)
            shown = "" if token < BYTE_VOCAB_SIZE else f"<{token}>"
            self._shown += len(shown)
            return text + shown
        text = self._decoded(bytes((token,)))
        # The token ends the last shown character, or begins or continues a character that is held back.
        held = bool(self._decoder.getstate()[0])
        self.starts.append(self._shown - (0 if held else 1))
        return text

    def flush(self) -> str:
        return self._decoded(b"", final=True)

    def copy(self) -> Detokenizer:
        twin = _ByteDetokenizer()
        twin._decoder.setstate(self._decoder.getstate())
        twin.starts, twin._shown = list(self.starts), self._shown
        return twin

    def _decoded(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final=final)
        if final:
            self._decoder.reset()
        self._shown += len(text)
        return text


class _WindowDetokenizer(Detokenizer):
    """Decode a short window again with each token, and show the new text at its end.

    Decoding each token alone would be wrong: a character may span tokens, and some decoders treat the first
    token of a text differently. Decoding the whole text for each token would take quadratic time. The window
    begins with the tokens of the last shown text, as context; the first window begins with the end of the
    prompt.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self.starts = []
        self._decode = tokenizer.decode
        self._context = context
        self._held: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._grown()
        # A replacement character at the end is an incomplete character. No character has more than four
        # bytes, so text that is still incomplete after several tokens stays so.
        unfinished = not text or text.endswith(_REPLACEMENT)
        if unfinished and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._settle(text)
        return text

    def flush(self) -> str:
        text = self._grown()
        self._settle(text)
        return text

    def copy(self) -> Detokenizer:
        twin = copy.copy(self)
        # the list is replaced and never changed, because copies share it
        twin._held, twin.starts = list(self._held), list(self.starts)
        return twin

    def _grown(self) -> str:
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def _settle(self, text: str) -> None:
        """Record that the held tokens have shown ``text``."""
        before, whole = len(self._decode(self._context)), self._decode(self._context + self._held)
        for count in range(len(self._held)):
            # A token begins after those characters of earlier tokens that do not change any more.
            stays = common_length(whole, self._decode(self._context + self._held[:count]))
            self.starts.append(self._shown + min(max(stays - before, 0), len(text)))
        self._shown += len(text)
        self._context, self._held = self._held, []
