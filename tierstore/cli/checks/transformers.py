"""``tierstore doctor --transformers``: checks transformers and :class:`TierStoreCache` in this environment.

A separate process uses the cache with a small random model, because importing torch and transformers takes
seconds and may fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierstore.cli.checks.check import Check, installed
from tierstore.cli.checks.engine import checks as daemon_checks
from tierstore.cli.checks.engine import dotted, probe, version_check

OLDEST, TRIED = (5, 24, 0), (5, 24, 0)

# The second cache must load the pages that the first one has saved.
_PROBE = """
import sys, tempfile
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from tierstore_connectors.transformers import TierStoreCache
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
ids = torch.arange(1, 41)[None]
directory = tempfile.TemporaryDirectory(prefix="tierstore-doctor-")
for _ in range(2):
    cache = TierStoreCache(model, directory.name, chunk_tokens=16, host_bytes=1 << 24)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, cache=cache)
    if not cache.flush(60):
        sys.exit("the pages were not stored within 60 s")
    tokens = int(cache.counters().get("loaded_tokens", 0))
    cache.close()
if tokens < 32:
    sys.exit(f"{tokens} of 40 tokens were loaded from the store")
"""


def checks(url: str | None) -> Iterator[Check]:
    """Check transformers, the cache, and the daemon at ``url`` (None: no daemon). Takes seconds."""
    version = installed("transformers")
    yield version_check(
        "transformers",
        version,
        OLDEST,
        TRIED,
        absent="pip install transformers torch, or run this there",
        old=f"TierStoreCache needs {dotted(OLDEST)} or newer",
        new=f"newer than the last tested version ({dotted(TRIED)}): test it first",
    )
    good = "the pages of a small model were saved and loaded"
    yield probe("TierStoreCache", "transformers", _PROBE, {}, installed=version is not None, good=good)
    if url is not None:
        yield from daemon_checks(url)
