"""The options of ``tierstore-engine``, each declared once. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.command_line import size_option
from tierstore.errors import UsageError
from tierstore.units import GIB
from tierstore_engine.settings import EngineSettings

if TYPE_CHECKING:
    from tierstore.tiers.overflow import Overflow
    from tierstore_engine.sampling import SamplingParams


MTP = "mtp"
"""The drafter that is a layer of the checkpoint, in ``--draft``."""
_DRAFTED = 5
_OVERFLOW_BYTES = 16 * GIB


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model."""

    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, a GGUF file, or tiny|demo|qwen2.5-0.5b|llama-3-8b")
    ]
    dtype: Annotated[
        str | None, typer.Option(help="float32|bfloat16|float16 [default: the model's]", show_default=False)
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder with the tokenizer and the chat template [default: the model's]", show_default=False
        ),
    ] = None
    expand_weights: Annotated[
        bool,
        typer.Option("--expand-weights", help="Expand quantised weights to the dtype when they are read"),
    ] = False
    weights_on_disk: Annotated[
        bool,
        typer.Option("--weights-on-disk", help="On a CPU: read weights from their file for each step"),
    ] = False

    def reading(self) -> dict[str, Any]:
        """Return how weights and tokenizer are read, as arguments of
        :func:`~tierstore_engine.build.open_model`."""
        return {
            "dtype": self.dtype,
            "expand_weights": self.expand_weights,
            "weights_on_disk": self.weights_on_disk,
            "tokenizer": self.tokenizer,
        }


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """A prompt, in a file or as an argument."""

    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file")] = None
    prompt: Annotated[str | None, typer.Option(help="The prompt, or text to add behind the file's")] = None

    def text(self) -> str:
        """Return the prompt. Raises :class:`UsageError` if no prompt is given, or if its file cannot be
        read."""
        if self.prompt_file is None and self.prompt is None:
            raise UsageError("no prompt: give --prompt-file, --prompt or both")
        try:
            before = self.prompt_file.read_text(encoding="utf-8") if self.prompt_file is not None else ""
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the prompt from {self.prompt_file}: {error}") from error
        return before + (self.prompt or "")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """An engine of a model, over a store. Sizes are in bytes. ``draft`` is ``prompt-lookup``, ``mtp``, a
    model, or None."""

    store: Annotated[
        str | None,
        typer.Option(help="Store directory, or address of a daemon [default: reuse pages of the pool only]"),
    ] = None
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Reuse no pages: compute every prompt as a whole")
    ] = False
    host_bytes: Annotated[int, size_option("Capacity of the store's host tier")] = GIB
    disk_bytes: Annotated[int, size_option("Capacity of the store's disk tier")] = 10 * GIB
    disk_codec: Annotated[
        str,
        typer.Option(metavar="NAME", help="Encode pages on disk (embedded store): none, lossless or zstd"),
    ] = "none"
    hbm_bytes: Annotated[
        int | None,
        size_option(
            "Size of the page pool [default: what generate's prompt needs; for serve a GPU's free memory, or "
            "65,536 tokens on a CPU]"
        ),
    ] = None
    overflow: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep pages that do not fit --hbm-bytes (on a GPU: nor --overflow-host-bytes) in a "
            "file in DIR (docs/beyond-memory.md)",
        ),
    ] = None
    overflow_bytes: Annotated[
        int | None, size_option("Size of the file in --overflow, for all pages [default: 16 GiB]")
    ] = None
    overflow_host_bytes: Annotated[
        int | None,
        size_option(
            "On a GPU: host memory for pages that do not fit --hbm-bytes, with or without --overflow"
        ),
    ] = None
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a page (see docs/sizing.md)")] = 64
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed per step")] = 1024
    plan: Annotated[
        str,
        typer.Option(help="How to use a cache hit: both-ends, one-way (whichever is faster), load, compute"),
    ] = "both-ends"
    device: Annotated[str, typer.Option(help="auto|cpu|cuda|cuda:N")] = "auto"
    kv_dtype: Annotated[
        str, typer.Option(help="auto (the model's dtype)|fp8_e4m3|fp8_e5m2|int8|int4|k8v4, or two as K/V")
    ] = "auto"
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Compute the same bits cold or warm, alone or with others (docs/serving.md)",
        ),
    ] = False
    tensor_parallel: Annotated[
        int,
        typer.Option(
            help="Number of processes that compute the model together, each on a GPU or all on the CPU "
            "(docs/serving.md)"
        ),
    ] = 1
    sequence_parallel: Annotated[
        int,
        typer.Option(
            help="Number of processes that hold --hbm-bytes of pages each, and compute the tokens in them, "
            "each on a GPU or all on the CPU (docs/serving.md)"
        ),
    ] = 1
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR", help="LoRA adapter in PEFT's format; may be repeated", show_default=False
        ),
    ] = None
    kv_scales: Annotated[
        str, typer.Option(help="Scales of a quantised KV: dynamic|checkpoint, or a file that calibrate wrote")
    ] = "dynamic"

    share_engines: Annotated[
        bool,
        typer.Option(
            "--share-engines",
            help="Share pages with vLLM and SGLang, by model instead of by engine (docs/sharing.md)",
        ),
    ] = False
    whole_windows: Annotated[
        bool,
        typer.Option(
            "--whole-windows",
            help="Save all pages of sliding windows, which SGLang needs (docs/sharing.md)",
        ),
    ] = False
    draft: Annotated[
        str | None,
        typer.Option(help="Speculative decoding: prompt-lookup, mtp (a layer of the checkpoint), or a model"),
    ] = None
    draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted per step at most [default: 5]", show_default=False)
    ] = None

    @property
    def most_drafted(self) -> int:
        """Return the largest number of tokens that are drafted in a step."""
        return _DRAFTED if self.draft_tokens is None else self.draft_tokens

    def check(self) -> None:
        """Check the combination of options. Raises :class:`UsageError`."""
        if self.draft is None and self.draft_tokens is not None:
            raise UsageError("--draft-tokens needs --draft: give prompt-lookup, mtp or a model")
        if self.overflow is None and self.overflow_bytes is not None:
            raise UsageError("--overflow-bytes needs --overflow: give the folder for the file")
        if self.draft == MTP and (self.overflow is not None or self.overflow_host_bytes is not None):
            raise UsageError("--draft mtp needs all pages in the pool: leave out --overflow, or --draft mtp")

    def settings(self) -> EngineSettings:
        return EngineSettings(
            prefill_chunk=self.prefill_chunk, plan=self.plan, whole_windows=self.whole_windows
        )

    def overflow_of(self, device: str) -> Overflow | None:
        """Return where pages are stored that do not fit into the pool's memory on ``device``. Raises
        :class:`UsageError` for a pool that has no size, and for options that do not fit the device."""
        if self.overflow is None and self.overflow_host_bytes is None:
            return None
        if self.hbm_bytes is None:
            raise UsageError("--overflow needs --hbm-bytes: the memory that pages may take")
        from tierstore.tiers.overflow import Overflow

        nbytes = _OVERFLOW_BYTES if self.overflow_bytes is None else self.overflow_bytes
        overflow = Overflow(self.overflow, nbytes, self.overflow_host_bytes or 0)
        overflow.check(device)
        return overflow

    def keeping(self) -> dict[str, Any]:
        """Return where pages are stored, as arguments of :func:`~tierstore_engine.build.build_engine`."""
        return {
            "store": self.store,
            "prefix_cache": not self.no_prefix_cache,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "disk_codec": self.disk_codec,
            "chunk_tokens": self.chunk_tokens,
        }


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(EngineOptions):
    """One prompt to continue. If ``hbm_bytes`` is None, the pool just holds the prompt and its answer."""

    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most")] = 128
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 turns this off")] = 0
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens whose sum reaches p")] = 1.0
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this × the likeliest")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler [default: a new one each run]")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-sequence")] = False
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of text")] = False

    def settings(self) -> EngineSettings:
        return replace(super().settings(), max_sequences=1)

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. Raises :class:`UsageError` for values out of range."""
        from tierstore_engine.sampling import SamplingParams

        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Many prompts instead of one. If ``max_sequences`` is None, it is as large as the memory allows."""

    batch: Annotated[
        Path | None,
        typer.Option(
            help="Continue all requests of a file in OpenAI's batch format or a simpler one (docs/batches.md)"
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(help="Append the results of --batch to a file, which continues an interrupted run"),
    ] = None
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja template of --batch [default: the model's]", show_default=False)
    ] = None
    max_sequences: Annotated[
        int | None,
        typer.Option(
            help="Sequences of --batch in one step at most [default: what memory allows, up to 64]",
            show_default=False,
        ),
    ] = None

    def check(self, prompt: PromptOptions, *, json: bool) -> None:
        """Check the combination of options. Raises :class:`UsageError`."""
        if self.batch is None:
            if (self.output, self.chat_template, self.max_sequences) != (None, None, None):
                raise UsageError("--output, --chat-template and --max-sequences need --batch")
        elif prompt.prompt is not None or prompt.prompt_file is not None:
            raise UsageError("give --batch, or a prompt, but not both")
        elif json:
            raise UsageError("--json is for one prompt: the results of --batch are JSON already")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(EngineOptions):
    """An engine to serve.

    If ``hbm_bytes`` is None, the pool takes a GPU's free memory, or has pages for 65,536 tokens on a CPU.
    ``most_hbm_bytes`` is the largest size that the pool may be resized to.
    """

    most_hbm_bytes: Annotated[
        int | None, size_option("Largest pool that POST /pool may set [default on a CPU: --hbm-bytes]")
    ] = None
    kv_role: Annotated[
        str, typer.Option(help="With a daemon: kv_both|kv_producer (saves only)|kv_consumer (loads only)")
    ] = "kv_both"
    max_sequences: Annotated[int, typer.Option(help="Sequences computed in one step at most")] = 32
    schedule: Annotated[
        str,
        typer.Option(help="Order of prompts: cache (fewest tokens left to compute) or fcfs (oldest first)"),
    ] = "cache"
    overtake_s: Annotated[
        float,
        typer.Option(
            help="Longest extra wait of a request under cache, compared with fcfs (docs/serving.md)"
        ),
    ] = 10.0

    def settings(self) -> EngineSettings:
        return replace(
            super().settings(),
            max_sequences=self.max_sequences,
            schedule=self.schedule,
            overtake_s=self.overtake_s,
        )
