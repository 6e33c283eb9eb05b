"""Prompts, and what a model generates for them with and without a cache over a store."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny_models import VOCAB

CHUNK = 16
MAX_LOGIT_DIFF = 1e-4


def prompt(tokens: int, seed: int = 7, rows: int = 1) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def ask(model: Any, ids: torch.Tensor, cache: Any = None, *, new: int = 5, **options: Any) -> Any:
    """Generate ``new`` tokens, greedily unless the options say otherwise."""
    # Models that follow another may set eos_token_id.
    fixed = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    shown = {"return_dict_in_generate": True, "output_logits": True}
    if cache is not None:
        options["cache"] = cache
    return model.generate(ids, **{"do_sample": False, **fixed, **shown, **options})


def same(found: Any, expected: Any) -> bool:
    """Whether two answers have the same tokens, and logits within the tolerance."""
    pairs = zip(found.logits, expected.logits, strict=True)
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    return torch.equal(found.sequences, expected.sequences) and difference <= MAX_LOGIT_DIFF


def loaded(cache: Any) -> int:
    """Tokens that were loaded from the store since this was last asked."""
    now = int(cache.counters().get("loaded_tokens", 0))
    before = getattr(cache, "_test_loaded", 0)
    cache._test_loaded = now
    return now - before


def padded(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch of prompts of one row each, padded on the left, as the arguments of ``generate``."""
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, width - row.shape[1] :] = row[0]
        mask[at, width - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}
