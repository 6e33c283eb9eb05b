"""``replay`` from the command line: read, run, show, write."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.policy import POLICIES
from tierstore.spec import KVSpec
from tierstore_tools import report
from tierstore_tools.replay import runs, show, sizing
from tierstore_tools.replay.capacity import Capacity
from tierstore_tools.replay.formats import LengthsTrace, Loaded, load
from tierstore_tools.replay.hinting import HintSource
from tierstore_tools.replay.packed import PackedTrace
from tierstore_tools.replay.tiered.machine import Machine
from tierstore_tools.replay.tiered.result import TieredRow
from tierstore_tools.replay.tiered.runs import TieredCase, run_tiered
from tierstore_tools.replay.tiered.settings import Tiers
from tierstore_tools.replay.trace import Extent

DEFAULT_CAPACITY = "1,5,10,25,50%"


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


def run(settings: Replay, *, json: str | None, plot: Path | None) -> None:
    """Raises :class:`UsageError` for what cannot be replayed as asked."""
    for target in filter(None, (plot, Path(json) if json and json != "-" else None)):
        if not target.absolute().parent.is_dir():
            raise UsageError(f"cannot write {target}: there is no such directory")
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
        trace = loaded.trace
        replayed = None if isinstance(trace, LengthsTrace) else _replay(settings, trace, phases)
    if loaded.complaints.count:
        left_out, first = loaded.complaints.count, loaded.complaints.first
        show.heading(f"left out {left_out} that could not be read, first {first}", to_stderr=True)
    if isinstance(trace, LengthsTrace):
        document = _size(settings, trace, plot, to_stderr)
    else:
        assert replayed is not None
        document = _show(settings, trace, replayed, plot, to_stderr)
    report.write_json({**_described(settings, loaded), **document}, json)


def _described(settings: Replay, loaded: Loaded) -> dict[str, object]:
    return {
        "trace": settings.trace.name,
        "format": loaded.format,
        "unreadable": loaded.complaints.count,
        "first_unreadable": loaded.complaints.first or None,
        "token_bytes": settings.token_bytes,
    }


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What came of it all."""

    extent: Extent
    rows: list[runs.Row]
    machine: Machine | None
    tiered: list[TieredRow]


def _replay(settings: Replay, trace: PackedTrace, phases: report.Phases) -> _Replayed:
    extent = trace.extent()
    if not extent.blocks:
        raise UsageError(f"{settings.trace} has no block in any prompt: there is nothing to replay")
    capacities = dict.fromkeys(
        capacity.blocks(
            block_tokens=trace.block_tokens, unique_blocks=extent.unique_blocks, spec=settings.spec
        )
        for capacity in settings.capacities
    )
    machine = None
    if settings.tiers is not None:
        if not trace.timed:
            raise UsageError(f"{settings.trace} has no timestamps: a replay through tiers needs them")
        machine = settings.tiers.machine(
            settings.spec, block_tokens=trace.block_tokens, unique_blocks=extent.unique_blocks
        )
    cases = [runs.Case(policy, blocks) for policy in settings.policies for blocks in capacities]
    rows: list[runs.Row] = []
    if cases:
        with phases.phase(f"{len(trace)} requests, {len(cases)} replays") as phase:
            rows = runs.run(trace, cases, hints=settings.hints, jobs=settings.jobs, progress=phase.update)
    tiered: list[TieredRow] = []
    if settings.tiers is not None and machine is not None:
        live = [policy for policy in settings.policies if policy in POLICIES]
        through = [TieredCase(policy, ahead) for policy in live for ahead in settings.tiers.prefetch]
        jobs = settings.jobs or runs.default_jobs(extent.blocks * len(through))
        with phases.phase(f"{len(through)} replays through the tiers") as phase:
            tiered = run_tiered(
                trace, machine, through, hints=settings.hints, jobs=jobs, progress=phase.update
            )
    return _Replayed(extent, rows, machine, tiered)


def _show(
    settings: Replay, trace: PackedTrace, replayed: _Replayed, plot: Path | None, to_stderr: bool
) -> dict[str, object]:
    extent, name = replayed.extent, settings.trace.name
    title = (
        f"{name}: {extent.requests:,} requests, {extent.unique_blocks:,} unique blocks of "
        f"{trace.block_tokens} tokens; at most {extent.ideal:.4f} can be hits"
    )
    if replayed.rows:
        show.hit_rates(replayed.rows, title=title, token_bytes=settings.token_bytes, to_stderr=to_stderr)
    if replayed.tiered:
        show.tiered(replayed.tiered, title="" if replayed.rows else title, to_stderr=to_stderr)
    for line in _remarks(settings, trace):
        show.heading(line, to_stderr=True)
    if plot is not None and replayed.rows:
        from tierstore_tools.replay import plot as drawing

        drawing.draw(replayed.rows, extent, title=name, token_bytes=settings.token_bytes, path=plot)
    return {
        "block_tokens": trace.block_tokens,
        "requests": extent.requests,
        "blocks": extent.blocks,
        "unique_blocks": extent.unique_blocks,
        "ideal": extent.ideal,
        "untimed_requests": trace.untimed,
        "sorted_by_time": trace.reordered,
        "rows": [asdict(row) for row in replayed.rows],
        "machine": None if replayed.machine is None else asdict(replayed.machine),
        "tiers": [{**asdict(row), "hit_rate": row.hit_rate} for row in replayed.tiered],
    }


def _remarks(settings: Replay, trace: PackedTrace) -> list[str]:
    remarks = []
    if settings.hints.name == "inferred" and not trace.has_stops:
        remarks.append("the trace does not say how answers ended: nothing could be inferred for hints")
    if trace.untimed:
        remarks.append(f"{trace.untimed} requests have no timestamp: taken with the one before them")
    if trace.misfits > len(trace) // 2:
        remarks.append(
            f"{trace.misfits} prompts do not have one id per {trace.block_tokens} tokens: "
            "if the trace's blocks are of another size, say --block-tokens"
        )
    return remarks


def _size(settings: Replay, trace: LengthsTrace, plot: Path | None, to_stderr: bool) -> dict[str, object]:
    if plot is not None or settings.tiers is not None:
        raise UsageError(f"{settings.trace} has no hash_ids: there are no hits to draw or to place in tiers")
    rows = sizing.size(trace, settings.capacities, settings.spec)
    show.sizes(
        rows,
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
