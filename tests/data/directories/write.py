"""Write the directories of this folder, and ``hits.json``: what each of them answers. See README.md.

python -m tests.data.directories.write FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path

import tierstore
from tests.data.directories.pages import MODELS, page, tokens_of
from tierstore import Identity, KVSpec
from tierstore.groups import GroupRule, Past
from tierstore.tiers.group_pools import bytes_for

POOL_PAGES = 40
CHECKPOINT_CHUNKS = 4


def opened(path, spec, codec, tenant=""):
    """A store with a pool for each group."""
    parts = spec.split()
    options = {
        "identity": Identity.of(spec, model="example", revision="1", tenant=tenant),
        "host_bytes": 4 << 20,
        "disk_bytes": 16 << 20,
        "disk_codec": codec,
    }
    pools = tierstore.open_pools(spec, bytes_for(parts, [POOL_PAGES] * len(parts)))
    return tierstore.open(
        path, spec, pools=pools, checkpoint_tokens=CHECKPOINT_CHUNKS * spec.chunk_tokens, **options
    )


def save(store, spec, prompt, session=None):
    """Save the pages of a prompt that a hit of all its tokens needs, the incomplete last ones included."""
    tokens = prompt.tokens.tolist()
    for group, part in enumerate(spec.split()):
        rule = GroupRule.of(part.groups[0])
        chunks = rule.pages(len(tokens), part.chunk_tokens)
        if rule.past is Past.STATE and not chunks:
            continue
        pool = store.pools[group]
        pages = store.allocate_hbm(len(chunks), group=group)
        for at, chunk in zip(pages, chunks, strict=True):
            made = page(part, group, tokens, chunk)
            pool.array[at] = 0
            whole = pool.array[at].reshape(made.shape[0], -1, made.shape[2])
            whole[:, : made.shape[1]] = made
        first = chunks[0]
        assert store.save_hbm(prompt, pages, first=first, group=group, session=session).wait(30)
        store.release_hbm(pages, group=group)


def prompts(chunk):
    """What is saved: the turns of a session, a prompt that leaves it inside of a chunk, a prompt of whole
    chunks, and a prompt that is shorter than a chunk."""
    turns = [3 * chunk + 7, 6 * chunk + 2, 7 * chunk, 9 * chunk + 5]
    return (
        turns,
        [
            [[0, 4 * chunk + 6], [20_000, 20_000 + chunk]],
            [[30_000, 30_000 + 5 * chunk]],
            [[40_000, 40_000 + chunk - 3]],
        ],
    )


def questions(chunk):
    """Prompts that are looked up, as ranges of tokens."""
    turns, others = prompts(chunk)
    yield [[0, turns[-1]]]
    yield [[0, turns[-1]], [50_000, 50_000 + 2 * chunk]]
    for turn in turns:
        yield [[0, turn]]
        yield [[0, turn - 1]]
        yield [[0, turn], [60_000, 60_000 + chunk]]
    for whole in (1, 2, 3, 4, 6, 9):
        yield [[0, whole * chunk]]
        yield [[0, whole * chunk + 3], [70_000, 70_010]]
    for other in others:
        yield other
        yield [*other, [80_000, 80_000 + chunk]]
        yield [*other[:-1], [other[-1][0], other[-1][1] - 2]]
    yield [[1, 3 * chunk]]


def main(folder):
    folder = Path(folder)
    hits = {}
    for model, layout in MODELS.items():
        spec = KVSpec.parse(layout)
        turns, others = prompts(spec.chunk_tokens)
        answers = []
        for codec in ("none", "lossless"):
            path = folder / "store"
            shutil.rmtree(path, ignore_errors=True)
            with opened(path, spec, codec) as store:
                prompt = store.prompt([])
                for turn in turns:
                    prompt.extend(range(len(prompt), turn))
                    save(store, spec, prompt, "conversation")
                for other in others:
                    save(store, spec, store.prompt(tokens_of(other)))
                assert store.flush(30)
            name = f"ee6812b_{model}_{codec}"
            pack(path, folder / f"{name}.tar.xz")
            with opened(path, spec, codec) as store:
                answers.append([answer(store, asked) for asked in questions(spec.chunk_tokens)])
        assert answers[0] == answers[1]
        hits[model] = answers[0]
    lines = ",\n".join(
        f' "{model}": [\n' + ",\n".join(f"  {json.dumps(each)}" for each in answers) + "\n ]"
        for model, answers in hits.items()
    )
    (folder / "hits.json").write_text(f"{{\n{lines}\n}}\n")
    shutil.rmtree(folder / "store")
    write_lossy(folder)


def pack(path, archive):
    with tarfile.open(archive, "w:xz", preset=9) as to:
        for file in sorted(path.iterdir()):
            to.add(file, file.name)


def write_lossy(folder):
    """One directory with the same 130 tokens of four tenants, each kept by another codec."""
    path, spec = folder / "store", KVSpec.parse(MODELS["full"])
    for codec in ("lossless", "fp8", "int8", "int4"):
        with opened(path, spec, codec, tenant=codec) as store:
            save(store, spec, store.prompt(range(130)))
            assert store.flush(30)
    pack(path, folder / "ee6812b_lossy.tar.xz")
    shutil.rmtree(path)


def answer(store, asked):
    hit = store.lookup(store.prompt(tokens_of(asked)))
    loaded = store.load(hit).wait(30)
    groups = loaded.groups or (tierstore.types.GroupPages(0, loaded.pages),)
    for group, each in enumerate(groups):
        store.release_hbm(each.pages, **({"group": group} if len(groups) > 1 else {}))
    return {
        "prompt": asked,
        "hit": loaded.tokens,
        "pages": [[each.first, len(each.pages)] for each in groups],
    }


if __name__ == "__main__":
    main(sys.argv[1])
