"""A process that saves and removes pages until it is killed. Not a test: ``python -m … DIR SEED``.

It says what it is about to commit (``?serial seed nbytes`` a page, ``-serial`` a removal) and what was
committed (``+serial``, ``~serial``).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.tierstore.tiers.disk.shelf import Shelf
from tierstore.units import KIB, MIB

OPTIONS = {"capacity_bytes": 5 * MIB, "page_bytes": 64 * KIB}
SIZES = [3000, 16 * KIB, 64 * KIB, 100_000, 300_000]


def payload(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def run(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    shelf = Shelf(path, **OPTIONS)
    records = shelf.records()
    say("opened")
    while True:
        seeds = [chance.getrandbits(32) for _ in range(chance.randint(1, 6))]
        views = iter(shelf._views([max(SIZES)] * len(seeds)))
        batch = []
        for page_seed in seeds:
            nbytes = chance.choice(SIZES)
            place = shelf.tier.reserve(nbytes)
            if place is None:
                break
            parent = chance.choice([0, *(record.serial for record in records)])
            view = next(views)[:nbytes]
            view[:] = payload(page_seed, nbytes)
            batch.append((shelf.record(nbytes, place, parent), view, page_seed))
        used = {record.parent for record, _, _ in batch}
        gone = [r for r in leaves(records, chance) if r.serial not in used] if len(batch) < len(seeds) else []
        for record, _, page_seed in batch:
            say(f"?{record.serial} {page_seed} {record.nbytes}")
        for record in gone:
            say(f"-{record.serial}")
        shelf.tier.write([(record, view) for record, view, _ in batch])
        removals = [shelf.tier.page_table.remove(record.serial) for record in gone]
        shelf.tier.commit([(record, view) for record, view, _ in batch], removals, {})
        for record in gone:
            records.remove(record)
            say(f"~{record.serial}")
        for record, _, _ in batch:
            records.append(record)
            say(f"+{record.serial}")


def leaves(records, chance):
    parents = {record.parent for record in records}
    free = [record for record in records if record.serial not in parents]
    return chance.sample(free, k=len(free) // 2)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
