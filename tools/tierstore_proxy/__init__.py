"""``tierstore-proxy``: one address for engines that compute prompts and engines that continue them.

::

    client ─ app.py ─┬─ prompts.py    what is asked, as far as the way depends on it
                     ├─ residency.py  which decode engine holds how much of it
                     ├─ choice.py     where it goes: pure
                     └─ upstream.py   the engines: requests under way, up or down, bytes

A prompt that no decode engine holds goes to a prefill engine first, with one token to generate and
``kv_transfer_params``; what that answers is put into the request for the decode engine, by vLLM's contract
(docs/handover.md). Pages are found by prompt, so the proxy carries no bytes of KV, holds nothing for anybody,
and has no state that a restart would lose but the requests under way. Whatever goes wrong before the decode
engine has begun to answer ends in a request to a decode engine alone, which is slower and as right.

Answers pass through as they arrive, byte for byte. An engine is not believed further than that: what the
proxy reads itself (a prefill's answer, token ids, a selector's choice) is bounded, and checked as types.
"""
