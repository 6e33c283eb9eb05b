"""``tierstore pin``, ``unpin`` and ``prefetch``: prompts named by their tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tierstore
from tests.daemons import SPEC, daemon_stats, pages_of
from tests.tierstore.cli.commands import PAGES, TOKENS, load_groups, run, save_groups
from tierstore.cli.prompts import read_tokens
from tierstore.errors import UsageError
from tierstore.keys import Identity, Prompt
from tierstore.testing.clock import wait_until


@pytest.fixture
def tokens_file(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


def test_what_is_pinned_outlives_an_eviction_until_it_is_unpinned(daemon, tokens_file):
    where = ("--connect", daemon.url)
    tokens_file.write_text(json.dumps(TOKENS[: 5 * SPEC.chunk_tokens + 3]))
    said = f"{5 * SPEC.chunk_tokens} of {5 * SPEC.chunk_tokens + 3} tokens pinned\n"
    assert run("pin", tokens_file, *where) == (0, said, "")
    run("evict", "host", *where)
    run("evict", "disk", *where)
    with daemon.store.lookup(TOKENS) as hit:
        assert hit.tokens == 5 * SPEC.chunk_tokens
    wait_until(lambda: not daemon_stats(daemon.store)["service"]["leases"])  # a client releases them late
    code, out, _ = run("unpin", tokens_file, *where)
    assert (code, out) == (0, said.replace("pinned", "unpinned"))
    run("evict", "disk", *where)
    run("evict", "host", *where)
    assert daemon.store.lookup(TOKENS).tokens == 0


def test_all_pins_are_shown_and_undone_together(daemon, tokens_file):
    where = ("--connect", daemon.url)
    assert run("pin", tokens_file, *where)[0] == 0
    assert "pinned by tenant" in run("stats", *where)[1]
    assert run("unpin", "--tenant", "bob", *where) == (0, "0 pages unpinned\n", "")
    assert run("unpin", "--all", *where) == (0, f"{PAGES} pages unpinned\n", "")
    assert "pinned by tenant" not in run("stats", *where)[1]
    code, _, err = run("unpin", *where)
    assert (code, err.count("\n")) == (2, 1)
    assert "--tenant NAME" in err


def test_prefetch_brings_pages_from_disk_into_the_host_tier(daemon, tokens_file):
    where = ("--connect", daemon.url)
    run("evict", "host", *where)
    code, out, err = run("prefetch", tokens_file, "--model", "m", *where)
    assert (code, err) == (0, "")
    assert out == (
        f"{len(TOKENS)} of {len(TOKENS)} tokens are stored; {len(TOKENS)} of them are in the host tier now "
        f"({len(TOKENS)} were on disk only)\n"
    )
    with daemon.store.lookup(TOKENS) as hit:
        assert hit.by_tier == {"host": len(TOKENS)}
    tokens_file.write_text("9 9 9")
    assert "0 of 3 tokens are stored" in run("prefetch", tokens_file, *where)[1]


def test_all_layer_groups_of_a_model_are_meant(daemon, tokens_file):
    where = ("--model", "groups", "--connect", daemon.url)
    save_groups(daemon.url)
    count = f"{len(TOKENS)} of {len(TOKENS)} tokens"
    assert run("pin", tokens_file, *where) == (0, f"{count} pinned\n", "")
    for tier in ("host", "disk"):
        run("evict", tier, "--connect", daemon.url)
    assert load_groups(daemon.url) == len(TOKENS)
    run("evict", "host", "--connect", daemon.url)
    code, out, err = run("prefetch", tokens_file, *where)
    assert (code, err) == (0, "")
    assert f"{count} are stored; {len(TOKENS)} of them are in the host tier now" in out
    assert run("unpin", tokens_file, *where) == (0, f"{count} unpinned\n", "")
    for tier in ("disk", "host"):
        run("evict", tier, "--connect", daemon.url)
    assert load_groups(daemon.url) == 0


def test_which_pages_are_meant_has_to_be_clear(daemon, tokens_file):
    where = ("--connect", daemon.url)
    other = Identity.of(SPEC, model="m", adapter="french")
    with tierstore.connect(daemon.url, SPEC, identity=other, lookup_s=5.0) as store:
        assert store.wait_connected(30)
        assert store.save(TOKENS, pages_of(TOKENS)).wait(30)
    code, out, err = run("pin", tokens_file, "--model", "m", *where)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--identity" in err
    assert "adapter french" in err
    assert run("pin", tokens_file, "--identity", other.digest.hex()[:8], *where)[0] == 0
    code, out, err = run("pin", tokens_file, "--model", "unknown", *where)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model m" in err


def test_the_line_about_identities_is_short_however_many_there_are(daemon, tokens_file):
    others = [Identity.of(SPEC, model=f"{n} " + 3000 * "x") for n in range(30)]
    with tierstore.connect(daemon.url, SPEC, identity=others[0], lookup_s=5.0) as store:
        assert store.wait_connected(30)
        for other in others:
            store.lookup(Prompt(other, TOKENS, chunk_tokens=SPEC.chunk_tokens))
        code, _, err = run("pin", tokens_file, "--connect", daemon.url)
    assert (code, err.count("\n")) == (2, 1)
    assert len(err) < 2000
    assert "more" in err


def test_a_daemon_that_knows_of_an_identity_from_disk_only(daemon, tokens_file):
    daemon.store.close()
    daemon.end()
    daemon.start()
    where = ("--connect", daemon.url)
    with tierstore.connect(daemon.url, SPEC, identity=Identity.of(SPEC, model="x"), lookup_s=5.0) as other:
        assert other.wait_connected(30)
    code, out, err = run("prefetch", tokens_file, "--model", "m", *where)
    assert (code, err) == (0, "")
    assert f"{len(TOKENS)} were on disk only" in out


@pytest.mark.parametrize(
    ("name", "text", "tokens"),
    [
        ("a.json", "[1, 2,\n 3]", [1, 2, 3]),
        ("a.txt", " 1 2\n3,4\n", [1, 2, 3, 4]),
        ("a.txt", "[]", None),
        ("a.txt", "", None),
        ("a.txt", "1 two 3", None),
        ("a.txt", "-1", None),
        ("a.json", "[1.5]", None),
        ("a.json", "[[1], [2]]", None),
        ("a.json", '{"a": 1}', None),
        ("a.txt", "4294967296", None),
    ],
)
def test_token_files(tmp_path, name, text, tokens):
    path = tmp_path / name
    path.write_text(text)
    if tokens is None:
        with pytest.raises(UsageError, match="holds no token ids"):
            read_tokens(path)
    else:
        assert read_tokens(path).tolist() == tokens


def test_token_files_of_numpy(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5))
    assert read_tokens(tmp_path / "a.npy").tolist() == list(range(5))
    np.save(tmp_path / "a.npy", np.zeros(5))
    with pytest.raises(UsageError, match="holds no token ids"):
        read_tokens(tmp_path / "a.npy")
    with pytest.raises(UsageError, match="cannot read"):
        read_tokens(tmp_path / "b.npy")
