"""Find the message of a chat that a character of the rendered prompt belongs to.

A chat template turns messages into one text. In most templates the text of the first messages is a prefix of
the text of all messages, so rendering growing prefixes shows where each message ends. Some templates treat
the last message differently, or move messages. There a place is only reported if the message's own text is
found around the character.

Everything here is pure: the caller renders.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from tierstore_engine.tokenizer import common_length

_LOOK_BACK = 4  # messages before the one that a character seems to belong to


class Spoken(Protocol):
    """A message: who says what."""

    @property
    def role(self) -> str: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """A place in a chat. ``message`` counts from 0. ``character`` counts within the message's text, and is
    None for what the template writes before or after that text. If the prompt has only the beginning of a
    message's text, its end is the first character that the prompt lacks."""

    message: int
    role: str
    character: int | None

    def __str__(self) -> str:
        where = "in the template's text around it" if self.character is None else f"at {self.character}"
        return f"message {self.message} ({self.role}) {where}"


def message_place(
    messages: Sequence[Spoken], text: str, at: int, render: Callable[[int], str]
) -> MessagePlace | None:
    """Return the place of character ``at`` of a rendered prompt.

    ``text`` is the prompt of all ``messages``. ``render(count)`` returns the text of the first ``count``
    messages alone, and is called a few times. Returns None behind the last message, and if the template does
    not tell which message it is.

    >>> @dataclass
    ... class Message:
    ...     role: str
    ...     text: str
    >>> chat = [Message("system", "Be short."), Message("user", "Why?")]
    >>> def render(count):
    ...     return "".join(f"{each.role}: {each.text} " for each in chat[:count])
    >>> message_place(chat, render(2) + "assistant: ", len("system: Be short. user: Why"), render)
    MessagePlace(message=1, role='user', character=3)
    """

    @cache
    def prefix(count: int) -> str:
        return render(count) if count else ""

    @cache
    def end(count: int) -> int:
        """Return where the first messages end, as far as their own text agrees with the whole."""
        return common_length(prefix(count), text)

    def exact(count: int) -> bool:
        return end(count) == len(prefix(count))

    number = bisect_right(range(1, len(messages) + 1), at, key=end)
    if number == len(messages):
        return None
    # A message that the template writes differently at a prompt's end seems to end early.
    first = next((each for each in range(number, max(number - _LOOK_BACK, -1), -1) if exact(each)), None)
    if first is None:
        return None
    behind = end(first)
    for each in range(first, number + 1):
        message = messages[each]
        shown = message.text.strip()
        whole = text
        if shown not in text and at <= end(each + 1):
            # The template drops a part of this message because of later ones, such as the reasoning of old
            # answers. Up to the place the prompt is as without the later ones.
            whole = prefix(each + 1)
        begin = whole.find(shown, behind) if shown else -1
        if begin < 0 or begin > at:
            continue
        behind = begin + len(shown)
        if at <= behind:
            if whole.find(shown, begin + 1, at + len(shown)) >= 0:
                return None  # such as a message of one letter, which is also in the template's text
            dropped = len(message.text) - len(message.text.lstrip())
            return MessagePlace(each, message.role, at - begin + dropped)
    if first == number and exact(number + 1):
        return MessagePlace(number, messages[number].role, None)
    return None
