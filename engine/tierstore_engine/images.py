"""Images in a prompt: their tokens, the embeddings that replace these tokens, and the keys of their pages.

An image takes the tokens ``start … stop`` of its prompt. In the token ids they are placeholders, which are
the same for every image. In the keys of pages they are *words*, which say which image it is::

    tokens   [ text | <image> <image> <image> … | text ]      what the model and the client count
    words    [ text | w0      w1      w2      … | text ]      what pages are found by

A word has 31 bits of a digest over the contents of this image and of all earlier ones, and a high bit that no
token id has. A hit that ends within the first eight words has compared fewer than 248 bits, so it is cut to
the image's beginning. Behind an image of fewer tokens, the next tokens of the text are words as well: each
token plus a digest over the image and the tokens between. So pages of one image are never those of another
one, and different text never has the same words.

The embedding of a ``crossed`` image takes no places of tokens: cross-attention layers read it, and the image
is one token. That token sees the image, and so do those behind it up to the next image. If the next image
follows at once, the tokens behind both see both.

With a ``grid`` an image has two-dimensional positions (M-RoPE): its tokens have a row and a column, and the
text behind it continues after the larger one of both sizes. Tokens of a ``mutual`` image see one another, so
no step ends inside of it.
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

_COMPARED = 8  # words that tell images apart
_WORD = 0x80000000


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt. ``embedding [rows, hidden_size]`` takes the places of the tokens from ``start``
    on, unless the image is ``crossed``. ``content`` is a SHA-256 over everything that changes the embedding.
    ``grid`` is its height and width in rows of the embedding, None if its tokens have positions like text."""

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
        """Raises :class:`RequestError` for images that overlap, or that the prompt does not hold."""
        self._images = tuple(images)
        at = 0
        for image in self._images:
            if not at <= image.start < image.stop <= len(tokens):
                raise RequestError(
                    f"an image takes the tokens {image.start} … {image.stop}, but they are not free in a "
                    f"prompt of {len(tokens)} tokens"
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
        """Return the tokens in ``start … stop`` that see crossed images, and the numbers of these images.

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
        """Return the number of tokens of the largest image whose tokens see one another; 0 without one."""
        return max((len(each.embedding) for each in self._images if each.mutual), default=0)

    def shortened(self, tokens: int) -> int:
        """Return the end of a hit of ``tokens`` tokens. A hit that ends within an image's first words is cut
        to the image's beginning."""
        for image in reversed(self._images):
            if image.start < tokens < image.start + _COMPARED:
                tokens = image.start
        return tokens

    def step_end(self, start: int, stop: int) -> int:
        """Return the end of a step from ``start``, at most ``stop`` unless a mutual image begins at
        ``start``: a step divides no mutual image."""
        for image in self._images:
            if image.mutual and image.start < stop < image.stop:
                return image.start if image.start > start else image.stop
        return stop

    def mutual(self, start: int, stop: int) -> tuple[range, ...]:
        """Return the parts of mutual images that are in ``start … stop``."""
        parts = (range(max(each.start, start), min(each.stop, stop)) for each in self._images if each.mutual)
        return tuple(part for part in parts if part)

    def rows(self, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """Return the embeddings that take the places of tokens in ``start … stop``, each with the first of
        these tokens."""
        found = []
        for image in self._images:
            first, end = max(image.start, start), min(image.stop, stop)
            if first < end and not image.crossed:
                found.append((first, image.embedding[first - image.start : end - image.start]))
        return found

    def positions(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the positions of the tokens ``start … stop`` on three axes (time, height, width), int64
        ``[tokens, 3]``. None if all are those of text."""
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
                # A digest over the token itself would be the same for some tokens: 31 bits are few.
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
