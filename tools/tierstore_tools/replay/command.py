"""``replay`` from the command line: read, run, show, write.

Results are written as they come: each is a line on stderr, and the document of ``--json FILE`` is written
anew after each with what there is by then (``unfinished`` says how many replays are missing). So a replay
that is killed leaves what it had.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from tierstore.errors import SpecError, UsageError
from tierstore.spec import KVSpec
from tierstore_tools import report
from tierstore_tools.replay import runs, show
from tierstore_tools.replay.capacity import Capacity
from tierstore_tools.replay.formats import LengthsTrace, LoadedTrace, load, whole
from tierstore_tools.replay.hints import HintSource
from tierstore_tools.replay.machine import Machine, Tiers
from tierstore_tools.replay.policies import Belady
from tierstore_tools.replay.tiered import TieredRow
from tierstore_tools.replay.trace import Trace, extent

DEFAULT_CAPACITY = "1,5,10,25,50%"
_CSV_BLOCK_TOKENS = (
    64  # the store's default chunk: for capacities of traces of lengths that are given in blocks
)


@dataclass(frozen=True, slots=True)
class Replay:
    """What to replay. ``spec`` is the model's, where one was named; ``tiers`` asks for a whole engine."""

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
    """The KV layout of a preset, of a folder with a ``config.json``, or of such a file. Raises
    :class:`UsageError` when it is none of these, or the model keeps something that has no size per token."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        from tierstore_engine.presets import PRESETS  # needs an extra, and a replay without a model none

        if model in PRESETS:
            return PRESETS[model].kv_spec()
        raise UsageError(
            f"no model {model!r}: neither a preset ({', '.join(PRESETS)}) nor a folder with a config.json"
        )
    try:
        config = msgspec.json.decode(whole(file), type=dict[str, object])
        return KVSpec.from_hf_config(config)
    except (msgspec.DecodeError, SpecError) as error:
        raise UsageError(f"{file}: {error}") from error


def run(settings: Replay, *, json: str | None, plot: Path | None) -> None:
    """Raises :class:`UsageError` for what cannot be replayed as asked."""
    report.require_targets(json, plot)
    if plot is not None and not settings.capacities:
        raise UsageError("--plot draws hit rates by capacity: say --capacity as well")
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
        show.heading(f"left out {left_out} that could not be read, first {first}", to_stderr=True)
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
    """The replays that were asked for, and what has come of them so far."""

    def __init__(self, settings: Replay, loaded: LoadedTrace, trace: Trace, json: str | None) -> None:
        self._settings = settings
        self._loaded = loaded
        self._trace = trace
        self._json = json
        self._extent = extent(trace)
        if not self._extent.blocks:
            raise UsageError(f"{settings.trace} has no block in any prompt: there is nothing to replay")
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
        """One replay has ended."""
        self._found[case] = row
        show.heading(show.one_line(row), to_stderr=True)
        self.write()

    def write(self, *, last: bool = False) -> None:
        """Write what there is. Only a regular file before the last time, and that at one stroke."""
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
        """Show all of it as tables, and as a picture."""
        found, name, token_bytes = self._extent, self._settings.trace.name, self._settings.token_bytes
        title = (
            f"{name}: {found.requests:,} requests, {found.unique_blocks:,} unique blocks of "
            f"{self._trace.block_tokens} tokens; at most {found.ideal:.4f} can be hits"
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
            remarks.append("the trace does not say how answers ended: nothing could be inferred for hints")
        if trace.untimed:
            remarks.append(f"{trace.untimed} requests have no timestamp: taken with the one before them")
        if trace.misfits > len(trace) // 2:
            remarks.append(
                f"{trace.misfits} prompts do not have one id per {trace.block_tokens} tokens: "
                "if the trace's blocks are of another size, say --block-tokens"
            )
        return remarks


# -- traces of lengths -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SizingRow:
    """How long a page stays at least in a tier of this capacity: if nothing is ever reused, every token of
    every prompt and answer is a new one, and the tier is written over once in capacity ÷ (tokens per second).

    ``turnover_s`` is None where the trace has no times, ``capacity_bytes`` where no model was named.
    ``hit_rate`` is always None: nobody knows."""

    capacity_tokens: int
    capacity_bytes: int | None
    turnover_s: float | None
    hit_rate: None = None


def _size(settings: Replay, trace: LengthsTrace, plot: Path | None, to_stderr: bool) -> dict[str, object]:
    if plot is not None or settings.tiers is not None:
        raise UsageError(f"{settings.trace} has no hash_ids: there are no hits to draw or to place in tiers")
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
        title=f"{settings.trace.name}: {len(trace):,} requests, {show.count(trace.tokens)} tokens; without "
        "hash_ids nobody can say what would be a hit",
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
