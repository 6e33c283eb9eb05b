"""``tierstore llama``: a proxy that gives a llama-server a prefix cache on disk.

::

    client ─ app.py ─┬─ requests.py   the requests whose prompts can be restored
                     ├─ slots.py      which slot a prompt goes to: pure decisions
                     └─ cache.py      states from the store into a slot, and back

Before a request, the longest held prefix of its prompt is restored into a free slot, and the request is sent
to that slot. After the answer, the new part of the slot's state is saved. Everything else passes through
unchanged, byte for byte. After any failure the request is forwarded, and llama-server computes its prompt as
without the proxy. llama-server compares a slot's tokens with the prompt's tokens. If the proxy chooses a
wrong slot, this costs time, but does not change the answer.
"""
