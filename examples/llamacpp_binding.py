"""llama.cpp's Python binding with a daemon: a second process restores the prompt that the first has computed.

    tierstore serve --disk /tmp/kv &
    python examples/llamacpp_binding.py MODEL.gguf

Run the program twice: the second process restores the prompt, even if the daemon was restarted in between. A
second argument is the daemon's address. docs/llamacpp.md describes the settings, and `tierstore llama`, a
proxy for llama-server.
"""

from __future__ import annotations

import sys
import time

from llama_cpp import Llama

from tierstore_connectors.llamacpp.binding import TierStoreLlamaCache

DOCUMENT = " ".join(f"Item {number} costs {number * 7 % 50 + 3} euros." for number in range(60))


def main(model: str, store: str | None = None) -> None:
    llm = Llama(model, n_ctx=4096, verbose=False)
    cache = TierStoreLlamaCache(llm, store)
    cache.wait_connected(5)
    llm.set_cache(cache)
    tokens = llm.tokenize(f"{DOCUMENT}\nHow much is item 7?\n".encode())
    held = tokens in cache
    began = time.monotonic()
    answer = llm.create_completion(tokens, max_tokens=8, temperature=0)["choices"][0]["text"]
    took = time.monotonic() - began
    print(f"asked {len(tokens)} tokens in {took:.2f} s, {'restored' if held else 'computed'}: {answer!r}")
    cache.close()


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
