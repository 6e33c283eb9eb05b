"""``tierstore-engine generate``: continue one prompt."""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore.units import format_size
from tierstore_engine.build import open_model_of
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RequestError
from tierstore_engine.limits import check_tokens
from tierstore_engine.loaded import OpenModel
from tierstore_engine.opening import open_draft, open_engine
from tierstore_engine.options import GenerateOptions
from tierstore_engine.outputs import Completion
from tierstore_engine.pool_sizes import check_pool, pages_within, pool_bytes, pool_pages_for
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

# Random weights (and some models) produce control characters, which would disturb a terminal.
_UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if chr(code) not in "\n\t"} | {
    127: "\N{REPLACEMENT CHARACTER}"
}


def run(
    options: GenerateOptions, prompt: str, *, out: TextIO | None = None, err: TextIO | None = None
) -> Completion:
    """Generate and print. Raises :class:`~tierstore.errors.TierStoreError` with a one-line message.

    The whole request is checked before weights are read and before the store is opened.
    """
    out, err = out or sys.stdout, err or sys.stderr
    params = options.sampling()
    settings, opened = options.settings(), open_model_of(options)
    spec = opened.config.kv_spec(chunk_tokens=options.chunk_tokens)
    settings.check_chunk(spec.chunk_tokens)
    tokens = opened.tokenizer.encode(prompt)
    if len(opened.adapters) > 1:
        raise UsageError("generate applies only one adapter: give --adapter once")
    pages = _pool_pages(options, opened, spec, settings, tokens)
    draft = open_draft(options, pages)
    engine = open_engine(options, opened, draft, pages=pages, settings=settings, model_name=options.model)
    adapter = next((each.name for each in opened.adapters), None)
    try:
        completion = _generate(engine, tokens, params, adapter, _Screen(out, err, text=not options.json))
    finally:
        engine.close()
    if options.json:
        print(json.dumps(report(completion), ensure_ascii=False), file=out)
    print(summary(completion), file=err)
    return completion


def summary(completion: Completion) -> str:
    """Return the run as one line: prompt tokens, tokens from each tier, TTFT, tokens per second."""
    metrics = completion.metrics
    tiers = {"hbm": 0, "host": 0, "disk": 0} | dict(metrics.reused_by_tier)
    reused = ", ".join(f"{count} from {tier}" for tier, count in tiers.items())
    return (
        f"prompt {metrics.prompt_tokens} tokens: {reused}; TTFT {metrics.ttft_s:.3f} s; "
        f"{metrics.generated_tokens} new tokens at {metrics.tokens_per_s:.1f} tokens/s"
    )


def report(completion: Completion) -> dict[str, Any]:
    """Return the run as JSON values; units are in the field names."""
    metrics = completion.metrics
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "finish_reason": completion.finish_reason.value,
        "prompt_tokens": metrics.prompt_tokens,
        "generated_tokens": metrics.generated_tokens,
        "reused_tokens": metrics.reused_tokens,
        "reused_tokens_by_tier": dict(metrics.reused_by_tier),
        "drafted_tokens": metrics.drafted_tokens,
        "accepted_tokens": metrics.accepted_tokens,
        "loaded_bytes": metrics.loaded_bytes,
        "load_s": metrics.load_s,
        "ttft_s": metrics.ttft_s,
        "tokens_per_s": metrics.tokens_per_s,
    }


class _Screen:
    """The output of a run: generated text on ``out``, and the progress of prefill on ``err``. Progress is
    shown only on a terminal, and the next text replaces it."""

    def __init__(self, out: TextIO, err: TextIO, *, text: bool) -> None:
        self._out = out if text else None
        self._plain = out.isatty()
        self._err = err if err.isatty() else None
        self._shown = False

    def text(self, text: str) -> None:
        self._clear()
        if self._out is not None:
            self._out.write(text.translate(_UNPRINTABLE) if self._plain else text)
            self._out.flush()

    def prefilled(self, done: int, total: int) -> None:
        if self._err is not None:
            self._err.write(f"\rprefill {done}/{total} tokens ({100 * done // total} %)")
            self._err.flush()
            self._shown = True

    def _clear(self) -> None:
        if self._shown and self._err is not None:
            self._err.write("\r\x1b[K")
            self._err.flush()
            self._shown = False


def _generate(
    engine: Engine, tokens: list[int], params: SamplingParams, adapter: str | None, screen: _Screen
) -> Completion:
    request_id = engine.add(tokens, params, adapter=adapter)
    while True:
        for output in engine.step():
            screen.text(output.text)
            if output.completion is not None:
                screen.text("\n")
                return output.completion
        done = engine.computed_tokens(request_id)
        if done < len(tokens):
            screen.prefilled(done, len(tokens))


def _pool_pages(
    options: GenerateOptions, model: OpenModel, spec: KVSpec, settings: EngineSettings, tokens: list[int]
) -> int:
    """Return the size of the pool, after checking that the request fits."""
    config = model.config
    check_tokens(tokens, vocab_size=config.prompt_tokens, limit=config.max_positions)
    most = min(len(tokens) + options.max_new_tokens, config.max_positions)
    needed = pool_pages_for(spec, most, sequences=1)
    nbytes = pool_bytes(spec, needed, settings)
    if options.hbm_bytes is None:
        check_pool(spec, needed, model.device, nbytes=nbytes)
        return needed
    given = options.hbm_bytes * options.sequence_parallel
    pages = pages_within(spec, given, settings)
    check_pool(spec, pages, model.device, nbytes=given)
    overflow = options.overflow_of(model.device)
    total = overflow.pages(spec.split()[0], pages) if overflow is not None else pages
    if total < needed:
        raise RequestError(
            f"the prompt's {len(tokens)} tokens and up to {options.max_new_tokens} new ones need "
            f"{needed} pages ({format_size(nbytes)}), but --hbm-bytes holds {pages}"
            + (f", and {total} with --overflow" if overflow is not None else "")
        )
    return pages
