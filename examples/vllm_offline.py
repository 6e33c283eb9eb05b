"""vLLM with a daemon: a second process loads the pages that the first process has computed.

    tierstore serve --host-bytes 8GiB --disk ./kv --disk-bytes 50GiB &
    python examples/vllm_offline.py MODEL [URL] [JSON]

Run the program twice: the second process reuses the document. URL is the daemon's address (default: this
user's daemon). JSON has more arguments of vllm.LLM. With TIERSTORE=auto in the environment, vLLM starts the
daemon and sets the connector itself: see docs/vllm.md.
"""

from __future__ import annotations

import json
import sys
from typing import Any

DOCUMENT = [3 + number % 200 for number in range(1000)]  # token ids; text works with a tokenizer


def main(model: str, url: str | None = None, options: str = "{}") -> None:
    from vllm import LLM, SamplingParams

    connector: dict[str, Any] = {
        "kv_connector": "TierStoreConnector",
        "kv_connector_module_path": "tierstore_connectors.vllm",
        "kv_role": "kv_both",
    }
    if url is not None:
        connector["kv_connector_extra_config"] = {"store": url}
    llm = LLM(model, kv_transfer_config=connector, **json.loads(options))
    sampling = SamplingParams(temperature=0, max_tokens=8)
    for question in ([5, 6, 7], [8, 9]):
        [output] = llm.generate({"prompt_token_ids": DOCUMENT + question}, sampling)
        answer = output.outputs[0].token_ids
        print(f"asked {len(DOCUMENT + question)} tokens, reused {output.num_cached_tokens}: {list(answer)}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
