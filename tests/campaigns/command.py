"""``faults`` from the command line: run, show, write, and say so when a promise was broken."""

from __future__ import annotations

from pathlib import Path

from tests.campaigns import runs as campaign
from tierstore.errors import TierStoreError
from tierstore_tools import machine, report

_SHOWN_FAILURES = 10


def run(directory: Path, *, runs: int, seed: int, json: str | None) -> None:
    """Raises :class:`TierStoreError` when anything was wrong, lost, or more than the cap."""
    with report.phases() as phases:
        result = campaign.run(directory, phases, runs=runs, seed=seed)
    _show(result, to_stderr=json == "-")
    report.write_json({"machine": machine.describe(), **result.to_json()}, json)
    bad = [row.fault for row in result.rows if not row.good]
    if bad:
        for failure in result.failures[:_SHOWN_FAILURES]:
            report.stderr.print(failure, markup=False, highlight=False, soft_wrap=True)
        raise TierStoreError(
            f"a store broke a promise after: {', '.join(bad)} (--seed {seed} does the same again)"
        )


def _show(result: campaign.FaultsResult, *, to_stderr: bool) -> None:
    report.table(
        "faults: wrong pages served, durable pages lost",
        ("fault", "runs", "wrong", "lost", "over cap", "failed checks", "recovery"),
        [
            (
                row.fault,
                f"{row.runs:,}",
                f"{row.wrong_pages}",
                f"{row.lost_pages}",
                f"{row.over_capacity}",
                f"{row.failed_checks}",
                report.seconds(row.recovery_s),
            )
            for row in result.rows
        ],
        to_stderr=to_stderr,
    )
