"""Images in a prompt: their tokens, the embeddings that replace these tokens, and the keys of their pages.

An image occupies the tokens ``start … stop`` of its prompt. The ids of these tokens are placeholders, which
are equal for every image. So the keys of pages are computed from *words*, which identify the image::

    tokens   [ text | <image> <image> <image> … | text ]      for the model and the client
    words    [ text | w0      w1      w2      … | text ]      for the keys of pages

A word has a high bit that no token id has, and 31 bits of a digest over the contents of its image and of all
earlier images. A hit that ends within an image's first eight words has compared fewer than 248 bits, so it is
cut to the image's beginning. If an image has fewer than eight tokens, the text tokens behind it also become
words: each is its token id plus a digest over the image and the tokens between. So a lookup never finds the
page of another image, and different texts never have the same words.

A ``crossed`` image is one token of the prompt, and only cross-attention layers read its embedding. This token
and the tokens behind it, up to the next image, attend to the image. If two images follow each other without
text between them, the tokens behind the second image attend to both.

The tokens of an image with a ``grid`` have two-dimensional positions (M-RoPE): a row and a column. The text
behind the image continues after the larger of the grid's height and width. The tokens of a ``mutual`` image
attend to one another, so a single step computes all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tierstore.keys import TOKEN_BYTES, TOKEN_DTYPE, PromptInput
from tierstore_engine.errors import RequestError

_COMPARED = 8  # the number of words that a hit must match to identify an image
_WORD = 0x80000000


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt. ``embedding [rows, hidden_size]`` replaces the embeddings of the tokens from
    ``start`` on, unless the image is ``crossed``. ``content`` is a SHA-256 over everything that changes the
    embedding. ``grid`` is the image's height and width in rows of the embedding, None if its tokens have
    positions like text."""

    start: int
    embedding: torch.Tensor
    content: bytes
    grid: tuple[int, int] | None = None
    mutual: bool = False
    crossed: bool = False

    @property
    def stop(self) -> int:
        return self.start + (1 if self.crossed else len(self.embedding))


class PromptImages:
    """The images of one prompt, in order. Immutable; forks share it.

    >>> image = PromptImage(1, torch.zeros(4, 8), bytes(32), grid=(2, 2))
    >>> PromptImages([7, 3, 3, 3, 3, 9], [image]).positions(0, 7).tolist()
    [[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3, 3, 3], [4, 4, 4]]
    """

    def __init__(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> None:
        """Raises :class:`RequestError` for images that overlap or exceed the prompt."""
        self._images = tuple(images)
        at = 0
        for image in self._images:
            if not at <= image.start < image.stop <= len(tokens):
                raise RequestError(
                    f"an image needs the tokens {image.start} … {image.stop}, but another image has them or "
                    f"they exceed the prompt of {len(tokens)} tokens"
                )
            at = image.stop
        self.words = self._words_of(tokens)
        self._positions = self._positions_of(len(tokens)) if any(each.grid for each in images) else None

    @property
    def inputs(self) -> tuple[PromptInput, ...]:
        """Return the images that cross-attention layers read."""
        crossed = (each for each in self._images if each.crossed)
        return tuple(PromptInput(each.start, each.content, len(each.embedding)) for each in crossed)

    def embedding(self, number: int) -> torch.Tensor:
        """Return the embedding of image ``number``."""
        return self._images[number].embedding

    def seen(self, start: int, stop: int) -> list[tuple[range, tuple[int, ...]]]:
        """Return the tokens in ``start … stop`` that attend to crossed images, and these images' numbers.

        >>> images = [PromptImage(at, torch.zeros(4, 8), bytes(32), crossed=True) for at in (1, 5, 6)]
        >>> PromptImages([7] * 9, images).seen(0, 9)
        [(range(1, 5), (0,)), (range(5, 6), (1,)), (range(6, 9), (1, 2))]
        """
        found, visible = [], list[int]()
        ends = [*(each.start for each in self._images[1:]), stop]
        for number, (image, end) in enumerate(zip(self._images, ends, strict=True)):
            follows = number > 0 and self._images[number - 1].stop == image.start
            visible = [*visible, number] if follows else [number]
            if image.crossed and (part := range(max(image.start, start), min(end, stop))):
                found.append((part, tuple(visible)))
        return found

    @property
    def longest_mutual(self) -> int:
        """Return the number of tokens of the largest mutual image; 0 if there is none."""
        return max((len(each.embedding) for each in self._images if each.mutual), default=0)

    def shortened(self, tokens: int) -> int:
        """Return the length of a hit of ``tokens`` tokens after this cut: if it ends within the first eight
        words of an image, it is cut to the image's beginning."""
        for image in reversed(self._images):
            if image.start < tokens < image.start + _COMPARED:
                tokens = image.start
        return tokens

    def step_end(self, start: int, stop: int) -> int:
        """Return the end of a step from ``start``: at most ``stop``, and not within a mutual image. A step
        that begins with a mutual image computes all of it, also beyond ``stop``."""
        for image in self._images:
            if image.mutual and image.start < stop < image.stop:
                return image.start if image.start > start else image.stop
        return stop

    def mutual(self, start: int, stop: int) -> tuple[range, ...]:
        """Return the parts of mutual images that are in ``start … stop``."""
        parts = (range(max(each.start, start), min(each.stop, stop)) for each in self._images if each.mutual)
        return tuple(part for part in parts if part)

    def rows(self, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """Return the embeddings that replace tokens in ``start … stop``, each with the position of its first
        token."""
        found = []
        for image in self._images:
            first, end = max(image.start, start), min(image.stop, stop)
            if first < end and not image.crossed:
                found.append((first, image.embedding[first - image.start : end - image.start]))
        return found

    def positions(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the positions of the tokens ``start … stop`` on three axes (time, height, width), int64
        ``[tokens, 3]``; None if no image has a grid."""
        known = self._positions
        if known is None:
            return None
        behind = torch.arange(max(start, len(known)), max(stop, len(known))) + (int(known[-1].max()) + 1)
        behind = (behind - len(known))[:, None].expand(-1, 3)
        return torch.cat((known[start:stop], behind))

    def _words_of(self, tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
        words = np.array(tokens, np.int64)
        chain = b""
        for image in self._images:
            chain = hashlib.sha256(chain + image.content).digest()
            stream = hashlib.shake_256(chain).digest(TOKEN_BYTES * (image.stop - image.start))
            words[image.start : image.stop] = np.frombuffer(stream, TOKEN_DTYPE) | _WORD
            chain_of_text = chain
            for at in range(image.stop, min(image.start + _COMPARED, len(tokens))):
                # A sum differs for different tokens. A digest of 31 bits would be equal for some tokens.
                shift = int.from_bytes(chain_of_text[:TOKEN_BYTES], "little")
                words[at] = (int(tokens[at]) + shift) % _WORD | _WORD
                chain_of_text = hashlib.sha256(chain_of_text + int(tokens[at]).to_bytes(8, "little")).digest()
        return words.astype(TOKEN_DTYPE)

    def _positions_of(self, tokens: int) -> torch.Tensor:
        parts, at, position = [], 0, 0
        for image in self._images:
            parts.append(torch.arange(position, position + image.start - at)[:, None].expand(-1, 3))
            position += image.start - at
            height, width = image.grid or (1, len(image.embedding))
            place = torch.arange(len(image.embedding))
            axes = torch.zeros_like(place), place // width, place % width
            parts.append(position + torch.stack(axes, dim=1))
            position, at = position + max(height, width), image.stop
        parts.append(torch.arange(position, position + tokens - at)[:, None].expand(-1, 3))
        return torch.cat(parts)
