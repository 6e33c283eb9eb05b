"""Prompts with images: the pixels count, whatever a client calls them, and how they are made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from tests.vllm import models
from tests.vllm.engines import ONE_THREAD
from tests.vllm.harness import patient
from tierstore_tools.vllm.engine import ENVIRONMENT

ALIGNED = 704  # of 16 tokens of the image and 700 of text


def ask(model, daemon, asks, **options):
    """What an engine of its own finds of each: see ``images.py``."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.vllm.images", str(model)),
            *map(json.dumps, (patient(daemon.url), options, asks)),
        ],
        env={**ENVIRONMENT, **ONE_THREAD, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert not done.returncode, done.stdout[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return [json.loads(line.removeprefix("found "))[2] for line in lines]


def test_images_are_told_apart_by_their_pixels(model, daemon):
    place = model(models.LLAVA)
    # A name that a client gives to two images: what vLLM then computes with is its affair, and is not stored.
    first = [[10, "a", None], [10, "a", ALIGNED], [200, "a", None], [200, "a", None], [10, None, ALIGNED]]
    assert ask(place, daemon, first, mm_processor_cache_gb=0) == [0, ALIGNED, 0, 0, ALIGNED]
    # In another life of the engine the name stands for the other image.
    second = [[200, "a", None], [200, "a", ALIGNED], [10, "another name", ALIGNED], [90, "another", None]]
    assert ask(place, daemon, second) == [0, ALIGNED, ALIGNED, 0]


def test_other_processors_make_other_pages(model, daemon, tmp_path):
    place = model(models.LLAVA)
    assert ask(place, daemon, [[10, None, None], [10, None, ALIGNED]]) == [0, ALIGNED]
    assert ask(place, daemon, [[10, None, None]], mm_processor_kwargs={"do_normalize": False}) == [0]
    edited = tmp_path / "edited"
    shutil.copytree(place, edited)
    config = json.loads((edited / "processor_config.json").read_text())
    (edited / "processor_config.json").write_text(json.dumps({**config, "chat_template": "x"}))
    assert ask(edited, daemon, [[10, None, None]]) == [0]
