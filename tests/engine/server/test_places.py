"""A character of a rendered chat is found in its message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jinja2")

from tierstore_engine.server.chat import PLAIN, ChatTemplate
from tierstore_engine.server.places import MessagePlace, message_place
from tierstore_engine.server.requests import ChatMessage

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    + CHATML
)
TRIMMED = CHATML.replace("m.content", "m.content | trim")
LAST_DIFFERS = (  # as in templates that show the thoughts of the last answer only
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last %}<last>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MOVES_SYSTEM = (  # the system's message is part of the last one
    "{% for m in messages %}{% if m.role != 'system' %}["
    "{% if loop.last %}{{ messages[0].content }}\n{% endif %}"
    "{{ m.content }}]{% endif %}{% endfor %}"
)
FORGETS_THOUGHTS = (  # as Qwen3's: answers before the last question are without their reasoning
    "{% set last = namespace(question=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.index0 < last.question %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
)
ALWAYS_ANSWERS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
CHAT = [
    ChatMessage(role="system", content="Be short. It is 14:31."),
    ChatMessage(role="user", content="  Why is the sky blue?  "),
    ChatMessage(role="assistant", content="Scattering."),
    ChatMessage(role="user", content="Why?"),
]


@dataclass
class Rendered:
    """A chat under a template."""

    chat: list[ChatMessage]
    template: ChatTemplate

    @property
    def text(self) -> str:
        return self.template.render(self.chat)

    def first(self, count: int) -> str:
        return self.template.render(self.chat[:count], answer=False)

    def place(self, at: int) -> MessagePlace | None:
        return message_place(self.chat, self.text, at, self.first)


def rendered(source: str, chat: list[ChatMessage] = CHAT) -> Rendered:
    return Rendered(chat, ChatTemplate(source))


@pytest.mark.parametrize("source", [PLAIN, CHATML, DEFAULT_SYSTEM, LAST_DIFFERS, ALWAYS_ANSWERS])
def test_every_character_of_a_message_is_found_in_it(source: str) -> None:
    found = rendered(source)
    begin = 0
    for number, message in enumerate(CHAT):
        begin = found.text.index(message.text, begin)
        for character in range(len(message.text)):
            place = found.place(begin + character)
            outside = message.text[:character].strip() == "" or message.text[character:].strip() == ""
            if not outside:
                assert place == MessagePlace(number, message.role, character)
        begin += len(message.text)


def test_a_template_may_drop_spaces_around_a_message() -> None:
    found = rendered(TRIMMED)
    at = found.text.index("sky")
    assert found.place(at) == MessagePlace(1, "user", CHAT[1].text.index("sky"))


def test_the_text_of_the_template_belongs_to_a_message_without_a_character() -> None:
    found = rendered(DEFAULT_SYSTEM, CHAT[1:])
    assert found.place(found.text.index("helpful")) == MessagePlace(0, "user", None)
    assert rendered(CHATML).place(2) == MessagePlace(0, "system", None)


def test_the_beginning_of_the_answer_belongs_to_no_message() -> None:
    for source in PLAIN, CHATML:
        found = rendered(source)
        assert found.place(len(found.text) - 2) is None


@pytest.mark.parametrize("at", range(1, 30))
def test_no_wrong_message_where_a_template_moves_them(at: int) -> None:
    found = rendered(MOVES_SYSTEM)
    place = found.place(at)
    assert (
        place is None
        or place.character is None
        or found.chat[place.message].text[place.character] == found.text[at]
    )


def test_a_message_that_ends_earlier_differs_at_its_end() -> None:
    found = rendered(CHATML)
    at = found.text.index("<|im_end|>")
    assert found.place(at) == MessagePlace(0, "system", len(CHAT[0].text))


def test_a_message_that_loses_its_beginning_differs_there() -> None:
    thought = ChatMessage(role="assistant", content="<think>Rayleigh.</think>Scattering.")
    found = rendered(FORGETS_THOUGHTS, [*CHAT[:2], thought, CHAT[3]])
    at = found.text.index("Scattering.")
    assert found.place(at) == MessagePlace(2, "assistant", 0)
    assert found.place(at + 1) is None  # behind it the shorter prompt is no longer the same
    assert found.place(found.text.index("Why?")) == MessagePlace(3, "user", 0)


@given(
    texts=st.lists(st.text("ab: \n", max_size=6), min_size=1, max_size=12),
    source=st.sampled_from([PLAIN, CHATML, LAST_DIFFERS, MOVES_SYSTEM, TRIMMED]),
    share=st.floats(0, 1),
)
def test_a_place_is_never_another_character(texts: list[str], source: str, share: float) -> None:
    roles: list[str] = ["system", "user", "assistant"]
    chat = [ChatMessage(role=roles[at % 3], content=text) for at, text in enumerate(texts)]  # type: ignore[arg-type]
    found = rendered(source, chat)
    at = int(share * len(found.text))
    place = found.place(at)
    if (
        place is not None
        and place.character is not None
        and place.character < len(chat[place.message].text.rstrip())
    ):
        assert chat[place.message].text[place.character] == found.text[at]


def test_few_beginnings_are_rendered() -> None:
    chat = [ChatMessage(role="user", content=f"message {number}") for number in range(4096)]
    found = rendered(PLAIN, chat)
    asked = []
    render: Callable[[int], str] = lambda count: (asked.append(count), found.first(count))[1]  # noqa: E731
    text = found.text
    place = message_place(chat, text, text.index("message 3000") + 8, render)
    assert place == MessagePlace(3000, "user", 8)
    assert len(asked) <= 15
