"""Find the message of a chat that a character of the rendered prompt belongs to.

A chat template turns messages into one text. In most templates the text of the first messages is a prefix of
the text of all messages, so rendering growing prefixes shows where each message ends. Some templates treat
the last message differently, or move messages. With such a template, a place is reported only if the
message's own text is found around the character.

This module does no I/O: the caller renders the prompts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from tierstore_engine.tokenizer import common_length

_LOOK_BACK = 4  # how many messages before the likely one are tried, too


class Spoken(Protocol):
    """A message: its role and its text."""

    @property
    def role(self) -> str: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """A place in a chat. ``message`` counts from 0. ``character`` is counted in the message's text. It is
    None for text that the template writes before or after that text. If the prompt has only the beginning of
    a message's text, ``character`` is the first one that is missing."""

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
        """Return where each of the first messages ends in the prompt. Stop at the first message whose
        rendered text differs from the prompt's."""
        return common_length(prefix(count), text)

    def exact(count: int) -> bool:
        return end(count) == len(prefix(count))

    number = bisect_right(range(1, len(messages) + 1), at, key=end)
    if number == len(messages):
        return None
    # If the template renders a message differently at the end of a prompt, the message seems to end too
    # early.
    first = next((each for each in range(number, max(number - _LOOK_BACK, -1), -1) if exact(each)), None)
    if first is None:
        return None
    behind = end(first)
    for each in range(first, number + 1):
        message = messages[each]
        shown = message.text.strip()
        whole = text
        if shown not in text and at <= end(each + 1):
            # The template drops a part of this message because of later messages, such as the reasoning of
            # old answers. Before this place, the prompt is the same as without the later messages.
            whole = prefix(each + 1)
        begin = whole.find(shown, behind) if shown else -1
        if begin < 0 or begin > at:
            continue
        behind = begin + len(shown)
        if at <= behind:
            if whole.find(shown, begin + 1, at + len(shown)) >= 0:
                # for example, the text of the message is one letter, which the template's text also has
                return None
            dropped = len(message.text) - len(message.text.lstrip())
            return MessagePlace(each, message.role, at - begin + dropped)
    if first == number and exact(number + 1):
        return MessagePlace(number, messages[number].role, None)
    return None
