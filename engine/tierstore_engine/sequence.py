"""One request while it is served: its tokens, the page tables with their KV, and its progress.

::

    tokens   [ prompt ........................ | generated ... | newest ]
    KV in    [ loaded ...... | computed ..................... ) computed = tokens whose KV is in `tables`
    saved    [ full pages ............. )       the partial last page is saved when the sequence leaves
"""

from __future__ import annotations

import copy
import enum
import math
import random
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Ints
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import torch

from tierstore.keys import Prompt
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded, Promise
from tierstore_engine.images import PromptImages
from tierstore_engine.meeting import Meeting
from tierstore_engine.outputs import (
    Completion,
    FinishReason,
    RequestId,
    RequestMetrics,
    StepLogprobs,
)
from tierstore_engine.sampling import Choice, Draw, SamplingParams
from tierstore_engine.step import PartialStep
from tierstore_engine.tables import GroupTable
from tierstore_engine.tokenizer import Detokenizer


class SequenceState(str, enum.Enum):
    WAITING = "waiting"  # holds no page: new, or parked
    LOADING = "loading"  # its pages are being loaded from the store
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class InputLoad:
    """A load of an input of cross attention. ``positions`` has the place of each loaded page in the input."""

    transfer: Transfer[Loaded]
    positions: Ints[int]

    def pages(self, group: int) -> list[int]:
        """Return the loaded pages in order. They are fewer than the input has if the load is incomplete."""
        groups = self.transfer.wait().groups
        loaded = groups[group].pages if groups else ()
        return [page for _, page in sorted(zip(self.positions, loaded, strict=False))]


@dataclass(slots=True)
class Loading:
    """A load that has not been taken over yet. It loads a hit, and ``inputs`` (by their numbers) that come
    after it."""

    hit: Transfer[Loaded]
    by_tier: dict[str, int]
    started: float
    inputs: Mapping[int, InputLoad] = field(default_factory=dict)

    @property
    def transfers(self) -> tuple[Transfer[Loaded], ...]:
        return self.hit, *(each.transfer for each in self.inputs.values())

    @property
    def transfer(self) -> Transfer[Loaded]:
        """Return a transfer that has not ended, if there is one."""
        return next((each for each in self.transfers if not each.done), self.hit)

    @property
    def lacking(self) -> int:
        """Return how many pages, of all groups together, have not been loaded yet."""
        running = [each.progress for each in self.transfers if not each.done]
        return sum(progress.pages - progress.pages_done for progress in running)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The model's outputs of a sequence's newest computed tokens, ``[tokens, hidden_size]``, from token
    ``first`` on."""

    first: int
    rows: torch.Tensor


class StopMatcher:
    """Finds stop strings in one growing text. The result does not depend on the pieces in which the text
    arrives.

    The text ends at the stop string that is complete first. If several are complete at the same character,
    the longest one counts.
    """

    def __init__(self, stops: Ints[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def copy(self) -> StopMatcher:
        """Return a matcher in the same state, for a text that continues independently."""
        return copy.copy(self)

    def push(self, text: str) -> str:
        """Add ``text``. Add text, and return the text that may be shown now. At a stop string, set
        ``stopped`` and drop the stop string and everything after it."""
        if self.stopped:
            return ""
        text = self._held + text
        start = self._first_stop(text)
        if start is not None:
            self.stopped = True
            self._held = ""
            return text[:start]
        shown = len(text) - self._could_begin(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text that was held back because it might have been the beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Return where the stop string that ends first begins."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _could_begin(self, text: str) -> int:
        """Return how many characters at the end of ``text`` are the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(slots=True)
class Tally:
    """The metrics of a sequence while it runs; see :class:`RequestMetrics`."""

    added: float
    token_times: list[float] = field(default_factory=list)
    reused_by_tier: dict[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0
    load_s: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Sequence:
    """The state of one request. Changed by the engine's thread only."""

    def __init__(
        self,
        request_id: RequestId,
        prompt: Prompt,
        tokens: Ints[int],
        params: SamplingParams,
        detokenizer: Detokenizer,
        *,
        max_tokens: int,
        stop_ids: frozenset[int],
        added: float,
    ) -> None:
        self.request_id = request_id
        self.priority = 0  # lower values come first
        self.deadline_s = math.inf  # when its first token is due, by the monotonic clock
        self.root = request_id  # the request that it was forked from, or itself
        self.adapter = ""  # the digest of its LoRA adapter; empty without one
        self.images: PromptImages | None = None  # None without images
        self.session: str | None = None  # the conversation, if known
        self.hint: Hint | None = None  # the caller's hints about future uses of the sequence's pages
        self.promise: Promise | None = None  # the promise of another engine; None after it was waited for
        self.submitted_tokens = 0  # whole chunks of the prompt that were saved when the sequence left
        self.no_save = False  # whether its pages are kept out of the store
        self.counted = False  # whether the store's statistics have counted its lookup
        self.no_load = False  # whether the sequence is computed from its beginning, without a lookup
        self.prompt = prompt  # all tokens whose KV is computed, and at least the request's own prompt
        self.tokens = list(tokens)
        self.prompt_tokens = len(self.tokens)
        self.max_tokens = max_tokens
        self.params = params
        self.state = SequenceState.WAITING
        self.tables: list[GroupTable] = []  # by layer group; empty while it waits
        # The ends of chunks at which all groups are saved, each with whether other prompts continue from
        # there.
        self.save_points: dict[int, bool] = {}
        self.computed = 0
        # the number of accepted tokens of the last draft, which are computed again for the states
        self.repeated = 0
        # For a drafter that has a layer of its own in the pages (tierstore_engine.predictor):
        self.outputs: Outputs | None = None  # None until a token was computed
        self.foreseen = 0  # the number of leading tokens for which the pages have the KV of that layer
        self.loading: Loading | None = None
        # set while the sequence is computed from its front and loaded from its back
        self.meeting: Meeting | None = None
        self.arriving = False  # whether loaded pages may still be arriving
        self.partial: PartialStep | None = None  # the computation of its next tokens while pages arrive
        self.in_step = False  # whether its pages may hold KV of an unfinished step
        self.tally = Tally(added)
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None  # why the request could not be completed
        self.losses = 0  # how often pages of the sequence were lost
        self._most_computed = 0
        self._stop_ids = stop_ids
        self._random = random.Random(params.seed)
        self._uniforms: deque[float] = deque()  # drawn, not used yet
        self._counts: Counter[int] = Counter()  # the counts of generated tokens, kept only for penalties
        self._prompt_ids: torch.Tensor | None = None  # None until a repetition penalty needs them
        self._detokenizer = detokenizer
        self._stops = StopMatcher(params.stop)
        self._text: list[str] = []
        self._logprobs: list[StepLogprobs] = []
        self._logits: list[torch.Tensor] = []

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.state.value}, {self.computed}/{len(self.tokens)} computed, "
            f"{sum(table.held for table in self.tables)} pages)"
        )

    @property
    def place(self) -> tuple[int, int, int]:
        """Return its position by first come, first served. A fork is as old as its original."""
        return self.priority, self.root, self.request_id

    @property
    def remaining(self) -> int:
        """Return for how many tokens KV must still be computed: 1 while decoding, or a few more after a draft
        if the model has recurrent states."""
        return len(self.tokens) - self.computed

    @property
    def prefills(self) -> bool:
        """Return whether more tokens must still be computed than a decoding step computes."""
        return self.remaining > 1 + self.repeated

    @property
    def decodes(self) -> bool:
        """Return whether the next step computes the newest token and, before it, only accepted tokens of a
        draft."""
        return self.state is SequenceState.RUNNING and self.remaining == 1 + self.repeated

    @property
    def coming(self) -> int:
        """Return how many pages, of all groups together, the loads in flight have not loaded yet."""
        load = self.loading or self.meeting
        return load.lacking if load is not None else 0

    @property
    def held(self) -> bool:
        """Return whether all tokens are computed, and a beam search decides how the sequence continues."""
        return self.state is SequenceState.RUNNING and self.remaining == 0

    @property
    def started(self) -> bool:
        """Return whether any of its tokens was computed yet."""
        return self._most_computed > 0

    def repeats(self, stop: int) -> int:
        """Return how many of the next tokens up to ``stop`` were computed before."""
        return max(min(stop, self._most_computed) - self.computed, 0)

    def advance(self, computed: int) -> None:
        """Record that a step has computed the KV of the first ``computed`` tokens."""
        self.tally.recomputed_tokens += self.repeats(computed)
        self._most_computed = max(self._most_computed, computed)
        self.in_step = False
        self.restore(computed)

    def restore(self, computed: int) -> None:
        """Record that the KV of the first ``computed`` tokens came from the store or from another
        sequence."""
        self.computed = computed
        self.repeated = 0
        if computed > len(self.prompt):
            self.prompt.extend(self.tokens[len(self.prompt) : computed])

    def output_of(self, token: int) -> torch.Tensor | None:
        """Return the model's output of a token, ``[hidden_size]``. Return None if the token is not among the
        newest ones."""
        outputs = self.outputs
        if outputs is None or not 0 <= token - outputs.first < len(outputs.rows):
            return None
        return outputs.rows[token - outputs.first]

    def grow(self, stop: int) -> bool:
        """Ensure that the tokens from the first uncomputed one up to ``stop`` have pages that no other
        sequence writes to. Return False without room; pages allocated by then stay in the tables."""
        return all(table.grow(self.computed, stop) for table in self.tables)

    def fork(self, request_id: RequestId, *, seed: int | None) -> Sequence:
        """Return a sequence with the same tokens that continues independently. It has no page yet."""
        twin = copy.copy(self)
        twin.request_id = request_id
        twin.params = replace(self.params, seed=seed)
        twin.prompt = self.prompt.copy()
        twin.tokens = list(self.tokens)
        twin.state = SequenceState.WAITING
        twin.tables = []
        twin.save_points = dict(self.save_points)
        twin.computed = twin.repeated = twin.foreseen = 0
        twin.loading = None
        twin.meeting = None
        twin.promise = None
        twin.arriving = False
        twin.partial = None
        twin.in_step = False
        twin.tally = Tally(time.monotonic(), reused_by_tier=dict(self.tally.reused_by_tier))
        twin._random = random.Random(seed)
        twin._uniforms = deque()
        twin._counts = Counter(self._counts)
        twin._detokenizer = self._detokenizer.copy()
        twin._stops = self._stops.copy()
        twin._text = list(self._text)
        twin._logprobs = list(self._logprobs)
        twin._logits = list(self._logits)
        return twin

    def draws(self, draft: Ints[int] = ()) -> list[Draw]:
        """Return the draw for the next token, and one for the token after each token of ``draft``.

        :meth:`append` consumes the random numbers: tokens that are not appended draw the same numbers again.
        """
        while len(self._uniforms) <= len(draft):
            self._uniforms.append(self._random.random())
        uniforms = islice(self._uniforms, len(draft) + 1)
        if not self.params.biased:
            return [Draw(self.params, uniform) for uniform in uniforms]
        counts = Counter(self._counts)
        draws = []
        for place, uniform in enumerate(uniforms):
            if place:
                counts[draft[place - 1]] += 1
            draws.append(Draw(self.params, uniform, self.params.bias(counts), self._repeated(counts)))
        return draws

    def _repeated(self, generated: Collection[int]) -> torch.Tensor | None:
        """Return the tokens of the prompt and those ``generated`` for the repetition penalty; None if it is
        off."""
        if self.params.repetition_penalty == 1:
            return None
        if self._prompt_ids is None:
            self._prompt_ids = torch.tensor(sorted(set(self.tokens[: self.prompt_tokens])))
        return torch.cat((self._prompt_ids, torch.tensor(list(generated), dtype=torch.int64)))

    def append(self, choice: Choice) -> str:
        """Append the next token, which may finish the sequence. Return the new text that later tokens cannot
        change."""
        token = choice.token
        self._note(choice)
        self.tokens.append(token)
        if self._uniforms:
            self._uniforms.popleft()
        if self.params.biased:
            self._counts[token] += 1
        self.tally.token_times.append(time.monotonic())
        if token in self._stop_ids:
            return self.finish(FinishReason.STOP)
        text = self._stops.push(self._detokenizer.push(token))
        self._text.append(text)
        if self._stops.stopped:
            return text + self.finish(FinishReason.STOP)
        if len(self.tokens) >= self.max_tokens:
            return text + self.finish(FinishReason.LENGTH)
        return text

    def extend(self, token: int) -> None:
        """Append a token that a beam search has chosen. The beam search also handles the text and the end."""
        self.tokens.append(token)

    def finish(self, reason: FinishReason) -> str:
        """Finish the sequence. Return the text that was held back at the end."""
        self.finish_reason = reason
        text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        self._text.append(text)
        return text

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request_id=self.request_id,
            text="".join(self._text),
            tokens=tuple(self.tokens[self.prompt_tokens :]),
            finish_reason=self.finish_reason,
            metrics=self._metrics(),
            logprobs=tuple(self._logprobs),
            logits=torch.stack(self._logits).numpy() if self._logits else None,
            submitted_tokens=self.submitted_tokens,
            error=self.error,
        )

    def _note(self, choice: Choice) -> None:
        if choice.logprobs is not None:
            self._logprobs.append(choice.logprobs)
        if choice.logits is not None:
            self._logits.append(choice.logits)

    def _metrics(self) -> RequestMetrics:
        tally, times = self.tally, self.tally.token_times
        return RequestMetrics(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=len(self.tokens) - self.prompt_tokens,
            reused_by_tier=dict(tally.reused_by_tier),
            loaded_bytes=tally.loaded_bytes,
            load_s=tally.load_s,
            ttft_s=times[0] - tally.added if times else 0.0,
            itl_s=tuple(later - earlier for earlier, later in pairwise(times)),
            preemptions=tally.preemptions,
            recomputed_tokens=tally.recomputed_tokens,
            drafted_tokens=tally.drafted_tokens,
            accepted_tokens=tally.accepted_tokens,
        )
