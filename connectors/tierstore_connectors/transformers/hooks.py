"""The places in a model that a :class:`~tierstore_connectors.transformers.cache.TierStoreCache` uses.

transformers does not tell a cache its tokens. So the model is given four hooks, once. They act only in calls
whose cache is a TierStoreCache of this very model:

- ``generate``: its end is a save point.
- ``prepare_inputs_for_generation``: the first call of a prompt loads the prompt's prefix.
- before and after each forward pass: the tokens are noted, and saved at a prompt's end.

The hooks have no state, so a copy of a model has them and uses its own caches.
"""

from __future__ import annotations

import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any


class HookedCache(ABC):
    """A cache that the hooks of a model call."""

    @abstractmethod
    def serves(self, model: Any) -> bool:
        """Return whether the cache was made for ``model``."""

    @abstractmethod
    def generation_begins(self, input_ids: Any, attention_mask: Any) -> None:
        """Record the length of the prompts, because transformers may cut them, or append candidates to them.
        Start again if the cache holds anything but a beginning of these prompts."""

    @abstractmethod
    def generation_ends(self) -> None:
        """Save what ``generate`` has computed."""

    @abstractmethod
    def prompt_begins(
        self, model: Any, ids: Any, following: int | None, arguments: Mapping[str, Any]
    ) -> int | None:
        """Load the prefix of a prompt. Return how many of its last tokens are still to be computed, None for
        all. ``following`` is transformers' own number, for the cache as it was."""

    @abstractmethod
    def forward_begins(self, arguments: Mapping[str, Any]) -> None:
        """Record the tokens of a forward pass."""

    @abstractmethod
    def forward_ends(self) -> None:
        """Save the prompt after its first forward pass."""


def install(model: Any) -> None:
    """Give ``model`` the hooks. Repeating it changes nothing."""
    generate, prepare = _methods(model.__class__)
    if getattr(vars(model).get("generate"), "__func__", None) is generate:
        return
    model.generate = types.MethodType(generate, model)
    model.prepare_inputs_for_generation = types.MethodType(prepare, model)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, with_kwargs=True)


@lru_cache(maxsize=64)
def _methods(kind: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``generate`` and ``prepare_inputs_for_generation`` for models of a class. transformers reads the
    signature of the latter."""

    @functools.wraps(kind.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _own(self, kwargs)
        if cache is None:
            return kind.generate(self, *args, **kwargs)
        given = args[0] if args else kwargs.get("inputs")
        ids = kwargs.get("input_ids") if given is None else given
        cache.generation_begins(ids, kwargs.get("attention_mask"))
        try:
            return kind.generate(self, *args, **kwargs)
        finally:
            cache.generation_ends()

    @functools.wraps(kind.prepare_inputs_for_generation)
    def prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _own(self, kwargs)
        if cache is not None and not args and kwargs.get("is_first_iteration"):
            kwargs["next_sequence_length"] = cache.prompt_begins(
                self, input_ids, kwargs.pop("next_sequence_length", None), kwargs
            )
        return kind.prepare_inputs_for_generation(self, input_ids, *args, **kwargs)

    return generate, prepare


def _own(model: Any, arguments: Mapping[str, Any]) -> HookedCache | None:
    """Return the cache of a call if it is one of ``model``."""
    found = arguments.get("cache")
    if found is None:
        found = arguments.get("past_key_values")
    return found if isinstance(found, HookedCache) and found.serves(model) else None


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    arguments = _named(model, args, kwargs)
    cache = _own(model, arguments)
    if cache is not None:
        cache.forward_begins(arguments)


def _after_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = _own(model, _named(model, args, kwargs))
    if cache is not None:
        cache.forward_ends()


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_parameters(model.__class__), args, strict=False)), **kwargs}


@lru_cache(maxsize=64)
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]
