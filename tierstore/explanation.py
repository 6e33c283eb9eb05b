"""Explain why tokens of a prompt are not served from the store.

A prompt consists of the hit and, behind it, spans of missed tokens, each with one reason. The tokens of the
hit and of all spans add up to the prompt (:meth:`Explanation.check`).

>>> missed = Miss(MissReason.EVICTED, first=64, tokens=36, tier="host", age_s=90.0)
>>> explanation = Explanation(prompt_tokens=100, hit_tokens=64, misses=(missed,))
>>> print(explanation.check())
100 tokens: 64 hit, 36 missed
  36 from token 64 on: evicted from host 90 s ago
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, TypeAlias

from msgspec import Meta

from tierstore.units import format_duration, format_size


class MissReason(str, Enum):
    """The reason why the store did not serve a span of tokens."""

    NEVER_SAVED = "never_saved"
    """The store knows no page of these tokens."""
    DIVERGED = "diverged"
    """The store holds a prompt that begins in the same way and continues differently."""
    EVICTED = "evicted"
    """The pages were stored, and were evicted to make room."""
    EXPIRED = "expired"
    """The pages' time to live is over."""
    SUPERSEDED = "superseded"
    """A later save point of the same conversation has replaced the pages."""
    LET_GO = "let_go"
    """The pages' session has ended, or the engine said that it needs the pages no longer."""
    OTHER_IDENTITY = "other_identity"
    """The pages are stored under another identity, such as another revision of the weights."""
    TAIL = "tail"
    """The span has less than a chunk, or is the token that an engine must compute in any case."""
    DECLINED = "declined"
    """Computing the tokens is faster than loading them, at the measured speeds."""
    LATE = "late"
    """The pages were found, or are being saved, and did not become available in time."""
    DAMAGED = "damaged"
    """A page does not match its checksum, so it is not served."""
    GROUP = "group"
    """One layer group lacks the pages that a longer hit needs."""
    OTHER_HOST = "other_host"
    """Another host has the pages, and they were not fetched."""
    NOT_WRITTEN = "not_written"
    """The tokens were computed and their pages not stored: no room, no budget, a full queue, or a disk that
    refuses writes."""

    @property
    def label(self) -> str:
        """The name of the reason, for people."""
        return self.value.replace("_", " ")


CONTEXT_TOKENS = 1024
"""The most tokens of a held prompt that an explanation shows behind the token at which prompts diverge."""

# Limits of fields in a daemon's answers:
_MOST_FIELDS = 64
_MOST_NAME = 1 << 16
_Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
MOST_EDITED = 256
""":meth:`Miss.rejoins` skips at most this many tokens of either prompt."""
LEAST_AGREEING = 16
""":meth:`Miss.rejoins` needs this many equal tokens to say that two prompts agree again."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Two prompts that diverge and agree again: behind ``prompt_tokens`` tokens of one prompt and
    ``held_tokens`` of the other, the next ``agreeing_tokens`` tokens are equal."""

    prompt_tokens: int
    held_tokens: int
    agreeing_tokens: int
    more: bool
    """Whether the prompts may agree for longer: only ``CONTEXT_TOKENS`` tokens of the held prompt are
    compared."""

    def __str__(self) -> str:
        new, old = self.prompt_tokens, self.held_tokens
        if new == old:
            edit = f"{_counted(new)} {'differs' if new == 1 else 'differ'}"
        elif not old:
            edit = f"{_counted(new)} inserted"
        elif not new:
            edit = f"{_counted(old)} left out"
        else:
            edit = f"{_counted(new)} in place of {old:,}"
        least = "at least " if self.more else ""
        return f"{edit}, then the same {least}{self.agreeing_tokens:,} follow"


def _counted(tokens: int) -> str:
    return f"{tokens:,} token{'s' * (tokens != 1)}"


@dataclass(frozen=True, slots=True)
class Miss:
    """A span of ``tokens`` missed tokens that begins at token ``first`` of the prompt.

    The other fields are details. A field is empty or None if the reason has no such detail.
    """

    reason: MissReason
    first: int
    tokens: int
    tier: _Text = ""
    """The tier that the pages left last, or the tier that holds them."""
    age_s: float | None = None
    """Seconds since the pages left the tier."""
    policy: _Text = ""
    """The policy that evicted the pages; ``request`` if a person or a program evicted them."""
    more_bytes: int | None = None
    """With about this much more capacity, the tier would still hold the evicted pages."""
    fields: Annotated[tuple[_Text, ...], Meta(max_length=_MOST_FIELDS)] = ()
    """The fields in which the other identity differs. The field ``tenant`` is never reported."""
    group: int | None = None
    """The number of the layer group that lacks pages."""
    cause: MissReason | None = None
    """Why the layer group lacks the pages."""
    why: _Text = ""
    """For pages that are not written, late or declined: the reason in words. For a layer group without a
    number: its name."""
    at: int | None = None
    """The token at which the prompt diverges from the nearest held prompt; None if only the chunk is known.
    """
    held_tokens: Annotated[tuple[int, ...], Meta(max_length=CONTEXT_TOKENS)] = ()
    """The next tokens of the nearest held prompt, from token ``at`` on."""

    @property
    def end(self) -> int:
        """The first token behind the span."""
        return self.first + self.tokens

    def __str__(self) -> str:
        return f"{self.tokens:,} from token {self.first:,} on: {self.sentence()}"

    def sentence(self) -> str:
        """Return the reason and its details in words."""
        reason = self.reason
        if reason is MissReason.GROUP:
            cause = f" ({_WORDS[self.cause]})" if self.cause is not None else ""
            lacking = f"layer group {self.group}" if self.group is not None else self.why
            return f"{lacking} lacks the pages that a longer hit needs{cause}"
        if reason is MissReason.OTHER_IDENTITY:
            return f"held under another identity, which differs in {', '.join(self.fields)}"
        if reason is MissReason.DIVERGED and self.at is not None:
            return f"diverges from a held prompt at token {self.at:,}"
        words = _WORDS[reason]
        if self.tier and reason in _LEFT:
            words += f" from {self.tier}"
        if self.age_s is not None:
            words += f" {format_duration(self.age_s)} ago"
        if self.policy:
            words += f" by {self.policy}"
        if self.more_bytes is not None:
            words += f"; {format_size(self.more_bytes)} more would have kept it"
        return f"{words}: {self.why}" if self.why else words

    def rejoins(self, prompt: Sequence[int]) -> Rejoin | None:
        """Return the smallest edit after which ``prompt`` agrees with the held prompt that it diverges from.
        An edit skips tokens of both prompts, and its size is the larger of the two numbers. Return None if
        the prompts do not agree again within ``MOST_EDITED`` tokens, or if the held prompt is unknown.

        >>> miss = Miss(MissReason.DIVERGED, first=0, tokens=40, at=3, held_tokens=(7, *range(20, 50)))
        >>> print(miss.rejoins([0, 1, 2, 8, 9, *range(20, 55)]))
        2 tokens in place of 1, then the same 30 follow
        """
        if self.at is None:
            return None
        held, own = self.held_tokens, tuple(prompt[self.at : self.at + MOST_EDITED + CONTEXT_TOKENS])
        starts: dict[tuple[int, ...], int] = {}  # where each run of tokens first occurs in the held prompt
        for place in range(min(MOST_EDITED, len(held) - LEAST_AGREEING) + 1):
            starts.setdefault(held[place : place + LEAST_AGREEING], place)
        edits = [
            (new, starts[run])
            for new in range(min(MOST_EDITED, len(own) - LEAST_AGREEING) + 1)
            if (run := own[new : new + LEAST_AGREEING]) in starts
        ]
        if not edits:
            return None
        new, old = min(edits, key=lambda edit: (max(edit), sum(edit)))
        agreeing = 0
        for ours, theirs in zip(own[new:], held[old:], strict=False):
            if ours != theirs:
                break
            agreeing += 1
        more = old + agreeing >= CONTEXT_TOKENS and self.at + new + agreeing < len(prompt)
        return Rejoin(new, old, agreeing, more)


_WORDS: Mapping[MissReason, str] = {
    MissReason.NEVER_SAVED: "never saved",
    MissReason.DIVERGED: "a held prompt continues differently from here",
    MissReason.EVICTED: "evicted",
    MissReason.EXPIRED: "expired",
    MissReason.SUPERSEDED: "superseded by a later save point",
    MissReason.LET_GO: "let go at the end of a session",
    MissReason.OTHER_IDENTITY: "held under another identity",
    MissReason.TAIL: "less than a chunk, or computed in any case",
    MissReason.DECLINED: "computing is faster than loading",
    MissReason.LATE: "not available in time",
    MissReason.DAMAGED: "damaged",
    MissReason.GROUP: "a layer group lacks pages",
    MissReason.OTHER_HOST: "on another host, not fetched",
    MissReason.NOT_WRITTEN: "computed but not kept",
}
_LEFT = (MissReason.EVICTED, MissReason.EXPIRED, MissReason.SUPERSEDED, MissReason.LET_GO)


def behind(misses: Iterable[Miss], first: int) -> list[Miss]:
    """Return the parts of ``misses`` from token ``first`` on. Each returned miss begins at the end of the one
    before it.

    >>> [(miss.first, miss.tokens) for miss in behind([Miss(MissReason.EVICTED, 0, 9)], 4)]
    [(4, 5)]
    """
    found = []
    for miss in misses:
        if miss.end > first:
            found.append(replace(miss, first=first, tokens=miss.end - first))
            first = miss.end
    return found


@dataclass(frozen=True, slots=True)
class MissedRequest:
    """A record of a request with missed tokens. It does not contain the prompt's tokens. ``at_s`` is in
    seconds since 1970. ``model`` is the name that the engine gave, else the model of the identity or the
    beginning of the identity's digest."""

    at_s: int
    client: Annotated[str, Meta(max_length=_MOST_NAME)]
    model: Annotated[str, Meta(max_length=_MOST_NAME)]
    prompt_tokens: int
    hit_tokens: int
    by_reason: Annotated[dict[MissReason, int], Meta(max_length=len(MissReason))]
    """The number of missed tokens by reason, in falling order."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons why ``prompt_tokens - hit_tokens`` tokens of a prompt are missed. ``misses`` are in prompt
    order."""

    prompt_tokens: int
    hit_tokens: int
    misses: tuple[Miss, ...]
    by_tier: Mapping[str, int] = field(default_factory=dict)
    """The tokens of the hit by tier, fastest first."""

    @property
    def by_reason(self) -> dict[MissReason, int]:
        """The number of missed tokens by reason, in falling order."""
        counts: Counter[MissReason] = Counter()
        for miss in self.misses:
            counts[miss.reason] += miss.tokens
        return dict(counts.most_common())

    def check(self) -> Explanation:
        """Return this explanation. Raise :class:`AssertionError` unless the hit and the misses add up to the
        prompt."""
        at = self.hit_tokens
        for miss in self.misses:
            assert miss.tokens > 0, f"{miss} has no tokens"
            assert miss.first == at, f"{miss} does not begin at token {at}"
            at = miss.end
        assert at == self.prompt_tokens, f"hit and misses end at token {at} of {self.prompt_tokens}"
        return self

    def __str__(self) -> str:
        missed = self.prompt_tokens - self.hit_tokens
        head = f"{self.prompt_tokens:,} tokens: {self.hit_tokens:,} hit, {missed:,} missed"
        return "\n".join([head, *(f"  {miss}" for miss in self.misses)])
