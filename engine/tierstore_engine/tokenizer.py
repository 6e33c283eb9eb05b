"""Text to token ids and back: a checkpoint's ``tokenizer.json``, or bytes for models without one."""

from __future__ import annotations

import codecs
import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from tierstore_engine.errors import ModelError

BOS_BYTE_ID = 256
EOS_BYTE_ID = 257
BYTE_VOCAB_SIZE = 258

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD_TOKENS = 8


class Detokenizer(ABC):
    """Turns one sequence's tokens into text as they come, never showing half a character."""

    @abstractmethod
    def push(self, token: int) -> str:
        """The text that has become certain with ``token``; it may be empty."""

    @abstractmethod
    def flush(self) -> str:
        """The text still held back at the end, with replacement characters for what stayed incomplete."""

    @abstractmethod
    def copy(self) -> Detokenizer:
        """One in the same state, for a sequence that goes on from here by itself."""


class Tokenizer(ABC):
    """One model's vocabulary."""

    @abstractmethod
    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The ids of ``text``; unless ``begin`` is False, with whatever the model expects at a prompt's start
        (which a chat template writes itself)."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, without special tokens."""

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of one token alone, None where it is part of a character and its own are not known."""
        text = self.decode([token])
        return None if _REPLACEMENT in text else text.encode()

    @abstractmethod
    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one sequence."""


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, then begin and end of sequence; ids beyond (a preset may have a larger
    vocabulary) are shown as ``<id>``."""

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        return [*((BOS_BYTE_ID,) if begin else ()), *text.encode("utf-8", errors="replace")]

    def decode(self, tokens: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()

    def token_bytes(self, token: int) -> bytes | None:
        return bytes((token,)) if token < 256 else super().token_bytes(token)

    def detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer()


class HFTokenizer(Tokenizer):
    """A ``tokenizer.json``. Raises :class:`ModelError` when it is missing or cannot be read."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{folder} has no tokenizer.json")
        try:
            self._fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ModelError(f"{file} is not a readable tokenizer: {error}") from error

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=begin).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._fast.decode(list(tokens)))

    def detokenizer(self) -> Detokenizer:
        return _WindowDetokenizer(self)


class _ByteDetokenizer(Detokenizer):
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if token < 256:
            return self._decoder.decode(bytes((token,)))
        shown = "" if token < BYTE_VOCAB_SIZE else f"<{token}>"
        return self.flush() + shown

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def copy(self) -> Detokenizer:
        twin = _ByteDetokenizer()
        twin._decoder.setstate(self._decoder.getstate())
        return twin


class _WindowDetokenizer(Detokenizer):
    """Decodes a short window again with each token and emits what has grown at its end.

    Decoding token by token would be wrong (a character may span tokens, and some decoders treat the first
    token of a text differently), decoding everything each time would be quadratic. The window begins with
    the tokens of the last emission, as context.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._grown()
        # A replacement character at the end is a character whose last bytes have not come yet. No character
        # has more than four bytes: what is still broken after several tokens will stay so.
        unfinished = not text or text.endswith(_REPLACEMENT)
        if unfinished and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._settle()
        return text

    def flush(self) -> str:
        text = self._grown()
        self._settle()
        return text

    def copy(self) -> Detokenizer:
        twin = copy.copy(self)
        twin._held = list(self._held)  # the context is replaced, never changed
        return twin

    def _grown(self) -> str:
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def _settle(self) -> None:
        self._context, self._held = self._held, []
