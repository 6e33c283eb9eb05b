"""Check that a model and its pool of pages can serve a request."""

from __future__ import annotations

from collections.abc import Sequence as Ints
from math import prod

from tierstore.errors import UsageError
from tierstore.tiers.group_pools import fits
from tierstore.units import format_size
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import RequestError
from tierstore_engine.images import PromptImage, PromptImages
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import Sequence


class Limits:
    """The limits that the model ``config`` and the pools of ``keeper`` set to requests. No method changes
    anything."""

    def __init__(self, config: ModelConfig, keeper: PageKeeper) -> None:
        self.config = config
        self._keeper = keeper
        self._connector = keeper.connector

    @property
    def longest(self) -> int:
        """Return the largest number of tokens that a sequence may have in this model and this pool."""
        most = self._keeper.longest(self._connector.pool.num_pages)
        return self.config.max_positions if most is None else min(self.config.max_positions, most)

    def max_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the largest number of tokens that a sequence may reach."""
        return min(prompt_tokens + new_tokens, self.config.max_positions)

    def check_prompt(self, tokens: Ints[int], params: SamplingParams) -> None:
        """Raise :class:`RequestError` for a prompt that this model or this pool can never serve."""
        check_tokens(tokens, vocab_size=self.config.prompt_tokens, limit=self.config.max_positions)
        unknown = [token for token in params.logit_bias if not 0 <= token < self.config.vocab_size]
        if unknown:
            raise RequestError(
                f"logit_bias names token {unknown[0]}, but the model's ids are between 0 and "
                f"{self.config.vocab_size - 1}"
            )
        pool = self._connector.pool
        # The KV of the last token is never computed, because no token follows.
        most = self.max_tokens(len(tokens), params.max_new_tokens) - 1
        pages = self._keeper.pages_for(most)
        if pages > pool.target:
            raise RequestError(
                f"the prompt's {len(tokens)} tokens and up to {params.max_new_tokens} new ones need {pages} "
                f"pages, but the pool has {pool.target}"
            )
        self._check_groups(most)

    def place_images(
        self, tokens: Ints[int], images: Ints[PromptImage], prefill_chunk: int, new_tokens: int
    ) -> PromptImages | None:
        """Return the images of a prompt; None if there are none. Raise :class:`RequestError` for embeddings
        that do not fit the prompt or the model, for a mutual image of more than ``prefill_chunk`` tokens, and
        for crossed images that do not fit the pool."""
        if not images:
            return None
        placed, config = PromptImages(tokens, images), self.config
        for image in images:
            rows, width = image.embedding.shape
            if width != config.hidden_size:
                raise RequestError(
                    f"an image's embedding has rows of {width} numbers, but the model needs "
                    f"{config.hidden_size}"
                )
            if image.crossed != (config.cross is not None):
                raise RequestError(
                    "an image must be crossed if and only if the model has cross-attention layers"
                )
            if image.grid is not None and (not config.rope.sections or prod(image.grid) != rows):
                raise RequestError(
                    f"an image of {rows} rows cannot have positions of a grid {image.grid} in this model"
                )
        if placed.longest_mutual > prefill_chunk:
            raise RequestError(
                f"an image of this model takes {placed.longest_mutual} tokens, which are computed together: "
                f"start with --prefill-chunk {placed.longest_mutual} or more"
            )
        if placed.inputs:
            self._check_groups(self.max_tokens(len(tokens), new_tokens) - 1, images=placed)
        return placed

    def check_beams(self, tokens: int, new_tokens: int, *, width: int, max_sequences: int) -> None:
        """Raise :class:`RequestError` if there is no room for a search of ``width`` beams."""
        if width > max_sequences:
            raise RequestError(
                f"a beam search of width {width} needs as many sequences at once, but max_sequences "
                f"is {max_sequences}"
            )
        most = self.max_tokens(tokens, new_tokens)
        pages = width * self._keeper.pages_for(most)
        if pages > self._connector.pool.target:
            raise RequestError(
                f"a beam search of width {width} over {tokens} tokens and up to {new_tokens} new ones may "
                f"need {pages} pages, but the pool has {self._connector.pool.target}"
            )
        self._check_groups(most, sequences=width)

    def check_resize(self, nbytes: int, sequence: Sequence, count: int) -> None:
        """Raise :class:`UsageError` if a pool of ``nbytes`` might not hold ``count`` sequences like
        ``sequence``."""
        peaks = self._keeper.peaks(sequence.max_tokens - 1, sequence.images)
        counts = [count * each for each in peaks]
        large_pages = nbytes // self._connector.pool.large_pages.large_bytes
        if not fits(self._connector.pools, counts, large_pages=large_pages):
            raise UsageError(
                f"request {sequence.request_id} may reach {sequence.max_tokens} tokens, and a pool of "
                f"{format_size(nbytes)} has no room for them: cancel it first, or wait for its end"
            )

    def _check_groups(self, tokens: int, *, sequences: int = 1, images: PromptImages | None = None) -> None:
        """Raise :class:`RequestError` if the pools cannot hold this many sequences, in all layer groups at
        once."""
        counts, pools = self._keeper.peaks(tokens, images), self._connector.pools
        if len(counts) > 1 and not fits(pools, [sequences * count for count in counts]):
            kinds = [pool.spec.groups[0].kind.value for pool in pools]
            needed = ", ".join(f"{sequences * n} of {kind}" for n, kind in zip(counts, kinds, strict=True))
            raise RequestError(
                f"{tokens} tokens need pages of every kind at once ({needed}), and the pool has no "
                "room for them"
            )


def check_tokens(tokens: Ints[int], *, vocab_size: int, limit: int) -> None:
    """Raise :class:`RequestError` for an empty prompt, unknown ids, or a prompt that leaves no position for
    a new token."""
    if not tokens:
        raise RequestError("the prompt is empty: it needs at least one token")
    check_length(len(tokens), limit)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RequestError(f"token ids must be between 0 and {vocab_size - 1} for this model")


def check_length(tokens: int, limit: int) -> None:
    """Raise :class:`RequestError` if a prompt of ``tokens`` tokens leaves no position for a new token."""
    if tokens >= limit:
        raise RequestError(
            f"the prompt has {tokens} tokens, but the model allows {limit} including the answer"
        )
