"""transformers with a store: a second process loads the prompt that the first process has computed.

    tierstore-engine fetch ./smollm2        # SmolLM2-135M-Instruct, or any model's folder or name
    python examples/transformers_generate.py ./smollm2 ./kv

Run the program twice: the second process loads the document. A daemon's URL may replace ./kv.
docs/transformers.md describes the settings.
"""

from __future__ import annotations

import inspect
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tierstore_connectors.transformers import TierStoreCache

DOCUMENT = " ".join(f"Item {number} costs {number * 7 % 50 + 3} euros." for number in range(60))


def main(folder: str, store: str) -> None:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cache = TierStoreCache(model, store)
    # The argument is named past_key_values before transformers 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for question in ("How much is item 7?", "How much is item 41?"):
        before = cache.counters().get("loaded_tokens", 0)
        ids = torch.tensor([tokenizer(f"{DOCUMENT}\n{question}\n")["input_ids"]])
        mask = torch.ones_like(ids)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, name: cache}
        out = model.generate(ids, attention_mask=mask, **options)
        loaded = int(cache.counters().get("loaded_tokens", 0) - before)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        print(f"asked {ids.shape[1]} tokens, loaded {loaded}: {answer!r}")
        cache.flush()
    cache.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
