"""Images in prompts: logits against transformers, reuse of KV and embeddings, and images that must not mix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.engine.pictured import CHUNK, FAMILIES, Pictured, picture, pictured, write_folder
from tests.portions import portion
from tests.tiny_models import rewrite_json
from tierstore.daemon.testing import Daemon
from tierstore_engine.build import load_model
from tierstore_engine.errors import ModelError, RequestError
from tierstore_engine.images import PromptImage, PromptImages
from tierstore_engine.loaded import LoadedModel

TEXT = "the cat sat on the mat and the dog lay on the log "


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_folder(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def models(folders: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    return cache(lambda name: load_model(str(folders(name)), device="cpu"))
