"""``tierstore-engine serve``: OpenAI's HTTP API over the bundled engine.

::

    HTTP ─ app.py ── requests.py   requests as types: JSON is checked against them
            │  │     chat.py       messages to a prompt, with the model's template
            │  │     defaults.py   sampling defaults of the model
            │  └──── responses.py  answers, whole or as server-sent events
            │  ├──── metrics.py    Prometheus
            │  └──── dashboard.py  the engine's data for the dashboard (tierstore/dashboard)
            └─ stepping.EngineThread ── Engine      on its own thread

The event loop reads, checks, counts and answers, and never waits for a step. Long texts are tokenized on
other threads. Requests that are too large, unknown or too many are refused before the engine sees them. Every
request holds one place of :class:`~tierstore_engine.server.admission.Admission` from its first byte to its
last.

uvicorn handles HTTP, and starlette does the routing. FastAPI would add pydantic as a second type checker
beside msgspec, which the project uses anyway and which is faster on prompts of 100,000 token ids.
"""
