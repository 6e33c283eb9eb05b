"""Turn messages into a prompt, with the model's chat template.

Templates are written in Jinja, with the interface that Hugging Face defines. A template is part of a model
from any source, so it runs in Jinja's sandbox. (transformers has the same function, but takes seconds and
hundreds of megabytes to import. Jinja is installed with torch.)
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tierstore_engine.errors import ModelError
from tierstore_engine.server.errors import bad_request
from tierstore_engine.server.requests import ChatMessage, TextPart
from tierstore_engine.vocabularies import template_of_gguf

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer_config.json"

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The template for models with random weights, because these models have no template."""


class ChatTemplate:
    """A model's template. Raises :class:`ModelError` for invalid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from None
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[ChatMessage],
        options: Mapping[str, Any] | None = None,
        *,
        answer: bool = True,
    ) -> str:
        """Return the prompt up to the place where the answer begins or, without ``answer``, to the end of the
        last message. Raises :class:`ApiError` (400) if the template refuses the messages, for example because
        roles do not alternate."""
        try:
            text = self._template.render(
                self._special_tokens,
                messages=[_plain(message) for message in messages],
                add_generation_prompt=answer,
                **dict(options or {}),
            )
        except _RefusedError as error:
            raise bad_request(f"the model's chat template says: {error}", param="messages") from None
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise bad_request(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from None
        return text


def load_template(
    folder: Path | None, file: Path | None = None, *, gguf: Path | None = None
) -> ChatTemplate | None:
    """Return the template in ``file``, or else the one in the model's folder, or else the one in the model's
    GGUF file.

    Returns a plain template for a model without a folder, and None if there is no template. Raises
    :class:`ModelError` for a file that cannot be read.
    """
    if file is not None:
        return ChatTemplate(_read(file), _special_tokens(folder))
    if folder is None:
        return ChatTemplate(PLAIN)
    if (folder / TEMPLATE_FILE).is_file():
        return ChatTemplate(_read(folder / TEMPLATE_FILE), _special_tokens(folder))
    source = _tokenizer_config(folder).get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if isinstance(source, str):
        return ChatTemplate(source, _special_tokens(folder))
    inside = template_of_gguf(gguf) if gguf is not None else None
    return ChatTemplate(inside.source, inside.special_tokens) if inside is not None else None


class _RefusedError(Exception):
    """Raised by a template that calls ``raise_exception``."""


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own filter escapes HTML


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Return a message for a template. Its content is text, or a list of parts if it has images."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": message.text}
    if message.images and isinstance(message.content, list):
        plain["content"] = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.content
        ]
    for name, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if value is not None:
            plain[name] = value
    return plain


def _special_tokens(folder: Path | None) -> dict[str, str]:
    """Return ``bos_token`` and similar tokens, by the names that templates use."""
    found = {}
    for name, value in (_tokenizer_config(folder) if folder is not None else {}).items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return {}
    try:
        config = json.loads(_read(file))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None
