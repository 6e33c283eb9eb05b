"""Compare the disk tier with and without encryption: put, get, and forget.

    python benchmarks/encryption.py --store /mnt/nvme --page-bytes 1MiB --pages 512

Each round writes a batch of pages to both tiers and reads it back with cold caches of the process, one tier
after the other, in alternating order. It prints the medians of the rounds, and the ratio of each pair of
neighbours. A busy machine disturbs the ratios less than the medians. The pages are random bytes. ``forget``
is the time until a tenant's key is dropped and its root deleted, durably. It does not depend on the number of
pages."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from tierstore.command_line import one_line_errors, size_option
from tierstore.keys import Identity
from tierstore.memory import Memory
from tierstore.tiers.disk import DiskTier, PageRecord
from tierstore.tiers.disk.keyring import Keyring
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import MIB, format_size

WAYS = ("plain", "sealed")
_BATCH_BYTES = 32 * MIB


class MeasuredTier:
    """One tier, and its memory for a batch."""

    def __init__(self, directory: Path, way: str, *, page_bytes: int, pages: int) -> None:
        keyring = Keyring.open(directory / "ring", os.urandom(32)) if way == "sealed" else None
        capacity = 2 * pages * slot_bytes(page_bytes) + 64 * MIB
        self.tier = DiskTier.open(
            directory / way, capacity_bytes=capacity, page_bytes=page_bytes, inline_bytes=0, keyring=keyring
        )
        self.identity = Identity("benchmark", "layout", tenant="tenant")
        self.batch = max(min(_BATCH_BYTES // slot_bytes(page_bytes), pages), 1)
        self.pages = pages
        self.page_bytes = page_bytes
        self.memory = Memory(self.batch * slot_bytes(page_bytes), shared=False)
        self.memory.populate()
        self.memory.view(0, self.memory.nbytes)[:] = os.urandom(self.memory.nbytes)

    def views(self) -> list[memoryview]:
        size = slot_bytes(self.page_bytes)
        return [self.memory.view(at * size, self.page_bytes) for at in range(self.batch)]

    def put(self) -> list[list[PageRecord]]:
        """Save all pages, one batch after the other, each durable."""
        saved = []
        for _ in range(0, self.pages, self.batch):
            parent = self.tier.serials.add_root(self.identity)
            places = self.tier.reserve_many(self.page_bytes, self.batch)
            records = [
                PageRecord(
                    self.tier.serials.new(),
                    parent,
                    os.urandom(16),
                    self.identity.digest,
                    os.urandom(256),
                    self.page_bytes,
                    place,
                )
                for place in places
            ]
            self.tier.write(list(zip(records, self.views(), strict=True)))
            self.tier.commit([(record, None) for record in records], [], {})
            saved.append(records)
        return saved

    def get(self, saved: list[list[PageRecord]]) -> None:
        """Read all pages."""
        for records in saved:
            assert self.tier.read(list(zip(records, self.views(), strict=True))).all_good

    def drop(self, saved: list[list[PageRecord]]) -> None:
        """Make room for the next round."""
        table = self.tier.page_table
        assert table is not None
        for records in saved:
            self.tier.commit([], [table.remove(record.serial) for record in records], {})

    def forget(self) -> None:
        """Forget the tenant, as :class:`tierstore.core.forgetting.Forgetting` does it on disk."""
        if self.tier.keyring is not None:
            self.tier.keyring.drop(lambda scope: True)
        self.tier.forget_roots(self.tier.serials.forget([self.identity.digest]))


def timed(took: dict[tuple[str, str], list[float]], way: str, verb: str, began: float) -> None:
    took[way, verb].append(time.perf_counter() - began)


def main(
    store: Annotated[Path, typer.Option(metavar="DIR", help="Directory on the disk to measure")],
    page_bytes: Annotated[int, size_option("Size of a page")] = MIB,
    pages: Annotated[int, typer.Option(help="Pages of a round")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds")] = 7,
    json_: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
) -> None:
    """Compare the disk tier with and without encryption."""
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=store) as own:
        benches = {way: MeasuredTier(Path(own), way, page_bytes=page_bytes, pages=pages) for way in WAYS}
        for number in range(rounds):
            for way in WAYS if number % 2 else WAYS[::-1]:
                bench = benches[way]
                began = time.perf_counter()
                saved = bench.put()
                timed(took, way, "put", began)
                began = time.perf_counter()
                bench.get(saved)
                timed(took, way, "get", began)
                bench.drop(saved)
        for way, bench in benches.items():
            bench.put()
            began = time.perf_counter()
            bench.forget()
            timed(took, way, "forget", began)
            bench.tier.close()
    moved = pages // benches["plain"].batch * benches["plain"].batch * page_bytes
    ratios = {
        verb: statistics.median(
            plain / sealed for plain, sealed in zip(took["plain", verb], took["sealed", verb], strict=True)
        )
        for verb in ("put", "get")
    }
    if json_:
        runs = {f"{way} {verb}": each for (way, verb), each in took.items()}
        typer.echo(json.dumps({"bytes": moved, "run_s": runs, "ratios": ratios}))
        return
    for (way, verb), each in sorted(took.items(), key=lambda pair: pair[0][::-1]):
        rate = f", {moved / statistics.median(each) / 1e9:.2f} GB/s" if verb != "forget" else ""
        typer.echo(f"{verb:6} {way:6} {1e3 * statistics.median(each):8.1f} ms{rate}")
    typer.echo(
        f"sealed runs at {ratios['put']:.2f} (put) and {ratios['get']:.2f} (get) of the speed of plain ones, "
        f"{format_size(moved)} in pages of {format_size(page_bytes)}, median of {rounds} rounds"
    )


if __name__ == "__main__":
    with one_line_errors("encryption"):
        typer.run(main)
