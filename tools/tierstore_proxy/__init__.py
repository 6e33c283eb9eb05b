"""``tierstore-proxy``: one address for engines that compute prompts and engines that continue them.

::

    client ─ app.py ─┬─ prompts.py    the parts of a request that decide its route
                     ├─ residency.py  which decode engine holds how much of the prompt
                     ├─ choice.py     the route: pure decisions
                     └─ upstream.py   the engines: running requests, up or down, bytes

If no decode engine holds a prompt, the request goes to a prefill engine first, with one token to generate and
``kv_transfer_params``. The proxy copies the ``kv_transfer_params`` of that answer into the request for the
decode engine, as in vLLM (docs/handover.md). The decode engine finds the pages by the prompt. The proxy
therefore carries no KV and reserves nothing, and its restart loses only running requests. If anything fails
before the decode engine has begun to answer, the proxy asks a decode engine alone. The request is then
slower, but its answer is the same.

Answers pass through as they arrive, byte for byte. The data that the proxy itself reads (a prefill's answer,
token ids, a selector's choice) has a size limit, and its types are checked.
"""
