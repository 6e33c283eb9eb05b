"""``tierstore-engine serve``: OpenAI's HTTP API over the bundled engine.

::

    HTTP ─ app.py ── requests.py   what a client may ask, as types: JSON is checked against them
            │  │     chat.py       messages to a prompt, by the model's own template
            │  └──── responses.py  what it is answered, whole or as server-sent events
            │  ├──── metrics.py
            │  └──── page.py       what the page to watch says (tierstore/dashboard shows it)
            └─ stepping.EngineThread ── Engine      a thread of its own

The event loop reads, checks, counts and answers; it never waits for a step. Long texts are tokenized on other
threads. What is refused is refused before the engine hears of it: too large, unknown, too much at a time.
Every request holds one place of :class:`~tierstore_engine.server.admission.Admission` from its first byte to
its last, and gives it back whatever happens.

uvicorn speaks HTTP and starlette routes. FastAPI would add pydantic, a second way to check types beside
msgspec, which this project has anyway and which is faster on prompts of 100,000 token ids.
"""
