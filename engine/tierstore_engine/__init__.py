"""The bundled paged-attention engine. Its public names import torch at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore_engine.beams import BeamHypothesis, BeamParams
    from tierstore_engine.build import build_engine, load_model, open_model
    from tierstore_engine.draft_model import DraftModel
    from tierstore_engine.drafting import Drafter, PromptLookupDrafter
    from tierstore_engine.engine import Engine
    from tierstore_engine.heap import freeze_heap
    from tierstore_engine.loaded import LoadedModel
    from tierstore_engine.outputs import Completion, EngineStats, FinishReason, RequestMetrics, StepOutput
    from tierstore_engine.sampling import SamplingParams
    from tierstore_engine.settings import EngineSettings

__all__ = [
    "BeamHypothesis",
    "BeamParams",
    "Completion",
    "DraftModel",
    "Drafter",
    "Engine",
    "EngineSettings",
    "EngineStats",
    "FinishReason",
    "LoadedModel",
    "PromptLookupDrafter",
    "RequestMetrics",
    "SamplingParams",
    "StepOutput",
    "build_engine",
    "freeze_heap",
    "load_model",
    "open_model",
]

_HOMES = {
    "beams": ("BeamHypothesis", "BeamParams"),
    "build": ("LoadedModel", "build_engine", "load_model", "open_model"),
    "draft_model": ("DraftModel",),
    "drafting": ("Drafter", "PromptLookupDrafter"),
    "engine": ("Engine",),
    "heap": ("freeze_heap",),
    "outputs": ("Completion", "EngineStats", "FinishReason", "RequestMetrics", "StepOutput"),
    "sampling": ("SamplingParams",),
    "settings": ("EngineSettings",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"tierstore_engine.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
