"""The hooks of a model that call a :class:`~tierstore_connectors.transformers.cache.TierStoreCache`.

transformers does not pass tokens to a cache. So the model gets four hooks, which act only in calls whose
cache is a TierStoreCache of this model:

- ``generate`` saves pages at its end.
- ``prepare_inputs_for_generation`` loads a prompt's prefix in its first call for the prompt.
- A hook before each forward pass records the tokens.
- A hook after each forward pass saves the pages of a prompt after the prompt's first forward pass.

The hooks have no state, so a copy of a model has the same hooks and uses its own caches.
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
        """Record the length of the prompts, because transformers may shorten the prompts or append candidate
        tokens to them. Reset the cache unless it holds a prefix of the prompts."""

    @abstractmethod
    def generation_ends(self) -> None:
        """Save the pages that ``generate`` has computed."""

    @abstractmethod
    def prompt_begins(
        self, model: Any, ids: Any, following: int | None, arguments: Mapping[str, Any]
    ) -> int | None:
        """Load the prefix of a prompt. Return how many of the prompt's last tokens must be computed, or None
        for all. ``following`` is this number before the load, as transformers has computed it."""

    @abstractmethod
    def forward_begins(self, arguments: Mapping[str, Any]) -> None:
        """Record the tokens of a forward pass."""

    @abstractmethod
    def forward_ends(self) -> None:
        """Save the pages of a prompt after the prompt's first forward pass."""


def install(model: Any) -> None:
    """Install the hooks in ``model``. Repeated calls do nothing."""
    generate, prepare = _methods(model.__class__)
    if getattr(vars(model).get("generate"), "__func__", None) is generate:
        return
    model.generate = types.MethodType(generate, model)
    model.prepare_inputs_for_generation = types.MethodType(prepare, model)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, with_kwargs=True)


@lru_cache(maxsize=64)
def _methods(kind: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``generate`` and ``prepare_inputs_for_generation`` with hooks, for models of the class ``kind``.
    Both keep their signature, which transformers reads."""

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
    """Return the cache in the arguments of a call, or None if it does not belong to ``model``."""
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
