"""A program that opens damaged copies of a store, many of them: none may end the process, none may lie.

``python -m tests.tierstore.tiers.disk.damaged_opener ORIGINAL SCRATCH FIRST COUNT``
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import tierstore
from tests.small_store import SPEC, load_bytes, pages_of
from tierstore.errors import StoreUnavailableError
from tierstore.keys import Identity
from tierstore.store import Store
from tierstore.tiers.disk.fsck import fsck

PAGE = 4096
PROMPTS = [list(range(1000 * number, 1000 * number + 40 + 16 * (number % 5))) for number in range(30)]
OPTIONS = {"host_bytes": 1 << 20, "disk_bytes": 4 << 20}


def open_store(path: Path, **options: int) -> Store:
    return tierstore.open(path, SPEC, identity=Identity.of(SPEC, model="llama"), **OPTIONS, **options)


def make(path: Path) -> None:
    """A store with pages in the index and outside of it, some of which have left."""
    for inline_bytes in (16 << 10, 0):
        for half in (PROMPTS[::2], PROMPTS[1::2]):
            with open_store(path, inline_bytes=inline_bytes) as store:
                for tokens in half:
                    store.save(tokens, pages_of(tokens)).wait(10)
                assert store.flush(10)
                store.evict("disk", 20)


def damage(index: Path, chance: random.Random) -> str:
    """Do something to the file, and say what."""
    data = bytearray(index.read_bytes())
    pages = len(data) // PAGE
    one, other = (PAGE * chance.randrange(pages) for _ in range(2))
    what = chance.choice(["swapped", "zeroed", "random", "copied", "cut", "bytes", "head"])
    if what == "swapped":
        data[one : one + PAGE], data[other : other + PAGE] = (
            data[other : other + PAGE],
            data[one : one + PAGE],
        )
    elif what == "zeroed":
        data[one : one + PAGE] = bytes(PAGE)
    elif what == "random":
        data[one : one + PAGE] = chance.randbytes(PAGE)
    elif what == "copied":
        data[one + 16 : one + PAGE] = data[other + 16 : other + PAGE]  # under the number that belongs there
    elif what == "cut":
        del data[one:]
    elif what == "bytes":
        for _ in range(chance.choice([1, 10, 100])):
            data[chance.randrange(len(data))] = chance.randrange(256)
    else:
        at = one + chance.randrange(200)  # the head of a page, and where its entries are
        data[at] ^= 1 << chance.randrange(8)
    index.write_bytes(data)
    return what


def use(path: Path, chance: random.Random) -> str:
    """Open a store and do everything with it that reads and writes its index."""
    try:
        store = open_store(path)
    except StoreUnavailableError as error:
        return "refused" if "tierstore fsck --repair" in str(error) else f"failed: {error}"
    with store:
        found = 0
        for tokens in PROMPTS:
            held, pages = load_bytes(store, store.lookup(tokens))
            assert pages == pages_of(tokens)[: len(pages)], "a lie"
            found += held
        for number in range(3):
            tokens = [chance.randrange(50_000) for _ in range(100)]
            store.save(tokens, pages_of(tokens)).wait(10)
            store.flush(2)
            store.evict("disk", 10 * number)
        for tokens in PROMPTS[::3]:
            store.save(tokens, pages_of(tokens)).wait(10)
        store.flush(2)
    return f"served {found} tokens"


def main(original: Path, scratch: Path, first: int, count: int) -> None:
    for seed in range(first, first + count):
        chance = random.Random(seed)
        path = scratch / str(seed)
        shutil.copytree(original, path)
        what = [damage(path / "index.lmdb", chance) for _ in range(chance.choice([1, 1, 3]))]
        sys.stdout.write(" ".join([str(seed), *what, ""]))
        sys.stdout.flush()  # it may be the last word
        outcome = use(path, chance)
        sys.stdout.write(f"{outcome}\n")
        assert fsck(path, repair=True).clean
        outcome = use(path, chance)
        assert outcome.startswith("served"), outcome
        assert fsck(path, repair=True).clean
        shutil.rmtree(path)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
