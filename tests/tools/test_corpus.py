from __future__ import annotations

import pytest

from tierstore.errors import UsageError
from tierstore_tools import corpus


def encode(text):
    return list(text.encode())


def test_prompts_have_exactly_the_length_asked_for_and_end_with_the_question():
    for tokens in (200, 100_000):
        prompt = corpus.long_prompt(encode, tokens, question=corpus.QUESTION)
        assert len(prompt) == tokens
        assert bytes(prompt).decode(errors="replace").endswith("Answer:")


def test_skip_gives_other_text():
    here = corpus.long_prompt(encode, 500, question="?")
    there = corpus.long_prompt(encode, 500, skip=5000, question="?")
    assert here[:400] != there[:400]


def test_too_short_texts_and_prompts_are_refused():
    with pytest.raises(UsageError, match="only 5 tokens, 99 are needed"):
        corpus.long_prompt(encode, 100, text="short", question="?")
    with pytest.raises(UsageError, match="too few"):
        corpus.long_prompt(encode, 3, question="four")
