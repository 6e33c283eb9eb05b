"""``tierstore-bench replay``: read a trace, run, print, write.

As soon as a result is known, it is printed as a line on stderr, and the document of ``--json FILE`` is
written again (``unfinished`` counts the missing replays). The results of a command that is killed are
therefore kept.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.errors import SpecError, UsageError
from tierstore.spec import KVSpec, read_json
from tierstore_tools import report
from tierstore_tools.replay import runs, show
from tierstore_tools.replay.capacity import Capacity
from tierstore_tools.replay.formats import LengthsTrace, LoadedTrace, load
from tierstore_tools.replay.hints import HintSource
from tierstore_tools.replay.machine import Machine, Tiers
from tierstore_tools.replay.policies import Belady
from tierstore_tools.replay.tiered import TieredRow
from tierstore_tools.replay.trace import Trace, extent

DEFAULT_CAPACITY = "1,5,10,25,50%"
_CSV_BLOCK_TOKENS = 64  # the store's default chunk: for capacities in blocks of a trace without blocks


@dataclass(frozen=True, slots=True)
class Replay:
    """The options. ``spec`` is the model's layout, or None if no model was named. With ``tiers`` a whole
    engine is simulated.
    """

    trace: Path
    policies: tuple[str, ...]
    capacities: tuple[Capacity, ...]
    hints: HintSource
    format_name: str = "auto"
    block_tokens: int | None = None
    session_gap_s: float = 0.0
    spec: KVSpec | None = None
    tiers: Tiers | None = None
    jobs: int | None = None

    @property
    def token_bytes(self) -> float | None:
        return None if self.spec is None else self.spec.token_bytes


def spec_of(model: str) -> KVSpec:
    """Return the KV layout of a preset, of a folder with a ``config.json``, or of such a file. Raises
    :class:`UsageError` for anything else, and if the model has a state without a size per token."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        # needs an extra that a replay without a model does not need
        from tierstore_engine.presets import PRESETS

        if model in PRESETS:
            return PRESETS[model].kv_spec()
        raise UsageError(
            f"{model!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with a config.json"
        )
    try:
        return KVSpec.from_hf_config(read_json(file))
    except SpecError as error:
        raise UsageError(f"{file}: {error}") from error


def run(settings: Replay, *, json: str | None, plot: Path | None) -> None:
    """Replay, print, write. Raises :class:`UsageError` for options that do not fit the trace."""
    report.require_targets(json, plot)
    if plot is not None and not settings.capacities:
        raise UsageError("--plot draws hit rates by capacity: it needs --capacity")
    to_stderr = json == "-"
    with report.phases() as phases:
        with phases.phase(f"reading {settings.trace.name}") as phase:
            loaded = load(
                settings.trace,
                format_name=settings.format_name,
                block_tokens=settings.block_tokens,
                session_gap_s=settings.session_gap_s,
                progress=phase.update,
            )
        if isinstance(loaded.trace, Trace):
            results = _Results(settings, loaded, loaded.trace, json)
            with phases.phase(f"{len(loaded.trace)} requests, {len(results.cases)} replays") as phase:
                runs.run(
                    loaded.trace,
                    results.cases,
                    hints=settings.hints,
                    done=results.add,
                    jobs=settings.jobs,
                    progress=phase.update,
                )
    if loaded.complaints.count:
        left_out, first = loaded.complaints.count, loaded.complaints.first
        show.heading(f"left out {left_out} unreadable entries, first {first}", to_stderr=True)
    if isinstance(loaded.trace, LengthsTrace):
        document = _size(settings, loaded.trace, plot, to_stderr)
        report.write_json({**_described(settings, loaded), **document}, json)
    else:
        results.show(plot, to_stderr=to_stderr)
        results.write(last=True)


def _described(settings: Replay, loaded: LoadedTrace) -> dict[str, object]:
    return {
        "trace": settings.trace.name,
        "format": loaded.format,
        "unreadable": loaded.complaints.count,
        "first_unreadable": loaded.complaints.first or None,
        "token_bytes": settings.token_bytes,
    }


class _Results:
    """The requested replays, and their results so far."""

    def __init__(self, settings: Replay, loaded: LoadedTrace, trace: Trace, json: str | None) -> None:
        self._settings = settings
        self._loaded = loaded
        self._trace = trace
        self._json = json
        self._extent = extent(trace)
        if not self._extent.blocks:
            raise UsageError(f"{settings.trace} has no block in any prompt")
        self._machine = self._asked_machine()
        self.cases: list[runs.AnyCase] = [
            runs.Case(policy, blocks) for policy in settings.policies for blocks in self._capacities()
        ]
        if self._machine is not None and settings.tiers is not None:
            live = [policy for policy in settings.policies if policy != Belady.name]
            self.cases += [
                runs.TieredCase(policy, ahead, self._machine)
                for policy in live
                for ahead in settings.tiers.prefetch
            ]
        self._found: dict[int, runs.AnyRow] = {}

    def _capacities(self) -> dict[int, None]:
        return dict.fromkeys(
            capacity.blocks(
                block_tokens=self._trace.block_tokens,
                unique_blocks=self._extent.unique_blocks,
                spec=self._settings.spec,
            )
            for capacity in self._settings.capacities
        )

    def _asked_machine(self) -> Machine | None:
        settings = self._settings
        if settings.tiers is None:
            return None
        if not self._trace.timed:
            raise UsageError(f"{settings.trace} has no timestamps: a replay through tiers needs them")
        return settings.tiers.machine(
            settings.spec, block_tokens=self._trace.block_tokens, unique_blocks=self._extent.unique_blocks
        )

    def add(self, case: int, row: runs.AnyRow) -> None:
        """Store the result of a finished replay, print it and write the document."""
        self._found[case] = row
        show.heading(show.one_line(row), to_stderr=True)
        self.write()

    def write(self, *, last: bool = False) -> None:
        """Write the results so far. Before the last write, results are written to regular files only, and
        each file is replaced atomically."""
        if self._json is None or self._json == "-" or Path(self._json).is_char_device():
            if last:
                report.write_json(self._document(), self._json)
            return
        part = f"{self._json}.part"
        report.write_json(self._document(), part)
        os.replace(part, self._json)

    @property
    def _rows(self) -> list[runs.ReplayRow]:
        rows = (row for _, row in sorted(self._found.items()))
        return [row for row in rows if isinstance(row, runs.ReplayRow)]

    @property
    def _tiered(self) -> list[TieredRow]:
        rows = (row for _, row in sorted(self._found.items()))
        return [row for row in rows if isinstance(row, TieredRow)]

    def _document(self) -> dict[str, object]:
        found, trace = self._extent, self._trace
        return {
            **_described(self._settings, self._loaded),
            "block_tokens": trace.block_tokens,
            "requests": found.requests,
            "blocks": found.blocks,
            "unique_blocks": found.unique_blocks,
            "ideal": found.ideal,
            "untimed_requests": trace.untimed,
            "sorted_by_time": trace.reordered,
            "unfinished": len(self.cases) - len(self._found),
            "rows": [asdict(row) for row in self._rows],
            "machine": None if self._machine is None else asdict(self._machine),
            "tiers": [{**asdict(row), "hit_rate": row.hit_rate} for row in self._tiered],
        }

    def show(self, plot: Path | None, *, to_stderr: bool) -> None:
        """Print all tables and draw the picture."""
        found, name, token_bytes = self._extent, self._settings.trace.name, self._settings.token_bytes
        title = (
            f"{name}: {found.requests:,} requests, {found.unique_blocks:,} unique blocks of "
            f"{self._trace.block_tokens} tokens; the highest possible hit rate is {found.ideal:.4f}"
        )
        rows, tiered = self._rows, self._tiered
        if rows:
            show.hit_rates(rows, title=title, token_bytes=token_bytes, to_stderr=to_stderr)
        if tiered:
            show.tiered(tiered, title="" if rows else title, to_stderr=to_stderr)
        for line in self._remarks():
            show.heading(line, to_stderr=True)
        if plot is not None and rows:
            show.draw(rows, found, title=name, token_bytes=token_bytes, path=plot)

    def _remarks(self) -> list[str]:
        trace = self._trace
        remarks = []
        if self._settings.hints.name == "inferred" and not trace.has_stops:
            remarks.append("the trace has no reasons for the ends of answers: no hint was inferred")
        if trace.untimed:
            remarks.append(
                f"{trace.untimed} requests have no timestamp and got that of the request before them"
            )
        if trace.misfits > len(trace) // 2:
            remarks.append(
                f"{trace.misfits} prompts do not have one id per {trace.block_tokens} tokens: "
                "set --block-tokens if the trace's blocks have another size"
            )
        return remarks


# -- traces of lengths -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SizingRow:
    """The least time that a page stays in a tier of this capacity. If no token is ever reused, the tier is
    overwritten once in capacity ÷ (tokens per second).

    ``turnover_s`` is None if the trace has no times, ``capacity_bytes`` if no model was named. ``hit_rate``
    is always None: it is unknown."""

    capacity_tokens: int
    capacity_bytes: int | None
    turnover_s: float | None
    hit_rate: None = None


def _size(settings: Replay, trace: LengthsTrace, plot: Path | None, to_stderr: bool) -> dict[str, object]:
    if plot is not None or settings.tiers is not None:
        raise UsageError(f"{settings.trace} has no hash_ids: --plot and tiers need them")
    rate = trace.tokens / trace.span_s if trace.span_s and trace.tokens else None
    rows = []
    for capacity in settings.capacities:
        tokens = _CSV_BLOCK_TOKENS * capacity.blocks(
            block_tokens=_CSV_BLOCK_TOKENS, unique_blocks=None, spec=settings.spec
        )
        nbytes = None if settings.spec is None else round(tokens * settings.spec.token_bytes)
        rows.append(SizingRow(tokens, nbytes, None if rate is None else tokens / rate))
    show.sizes(
        [(row.capacity_tokens, row.capacity_bytes, row.turnover_s) for row in rows],
        title=f"{settings.trace.name}: {len(trace):,} requests, {show.count(trace.tokens)} tokens; hits are "
        "unknown without hash_ids",
        to_stderr=to_stderr,
    )
    return {
        "requests": len(trace),
        "tokens": trace.tokens,
        "span_s": trace.span_s,
        "unique_blocks": None,
        "ideal": None,
        "rows": [asdict(row) for row in rows],
    }
