"""``tierstore why`` against a daemon in a process of its own."""

from __future__ import annotations

import json
import re

import pytest

import tierstore
from tests.daemons import SPEC, pages_of
from tests.tierstore.cli.commands import GROUPS_IDENTITY, TOKENS, Terminal, run, save_groups
from tierstore.keys import Identity
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess

EDITED = [*TOKENS[:100], *[7] * 6, *TOKENS[106:]]


@pytest.fixture
def why(daemon, tmp_path):
    """Return the output of `tierstore why` about some tokens, or about the last requests."""
    file = tmp_path / "tokens.json"

    def why_(tokens=None, *flags):
        if tokens is not None:
            file.write_text(json.dumps(tokens))
            flags = (file, *flags)
        code, out, err = run("why", *flags, "--connect", daemon.url)
        assert (code, err) == (0, "")
        return json.loads(out) if "--json" in flags else out

    return why_


def evict(daemon, pages):
    for tier in ("host", "disk"):
        assert run("evict", tier, "--pages", pages, "--connect", daemon.url)[0] == 0


def test_a_prompt_that_is_held_is_a_hit(why):
    assert why(TOKENS) == "320 tokens: 320 hit (host 320), 0 missed\n"


def test_pages_that_were_evicted_by_request(daemon, why):
    evict(daemon, 2)
    out = why(TOKENS)
    assert out.startswith("320 tokens: 288 hit (host 288), 32 missed\n")
    assert re.search(r"^evicted +from disk \d+ s ago by request +32 +288$", out, re.M)
    document = why(TOKENS, "--json")
    assert document["missed_tokens_by_reason"] == {"evicted": 32}
    [miss] = document["misses"]
    assert (miss["first_token"], miss["tokens"], miss["tier"]) == (288, 32, "disk")
    assert miss["policy"] == "request"


def test_pages_that_had_to_make_room(directory, tmp_path):
    daemon = DaemonProcess(directory, disk=False).start()  # 512 pages
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    try:
        identity = Identity.of(SPEC, model="m")
        with tierstore.connect(daemon.url, SPEC, identity=identity, lookup_s=5.0) as store:
            assert store.wait_connected(30)
            assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == len(TOKENS)
            for first in (10_000, 20_000):
                tokens = list(range(first, first + 300 * SPEC.chunk_tokens))
                assert store.save(tokens, pages_of(tokens)).wait(30) == len(tokens)
        code, out, err = run("why", file, "--connect", daemon.url)
    finally:
        daemon.kill()
    assert (code, err) == (0, "")
    assert out.startswith("320 tokens: 0 hit, 320 missed\n")
    assert re.search(
        r"^evicted +from host .* ago by default; \S+ KiB more would have kept it +320 +0$", out, re.M
    )


def test_a_prompt_that_was_never_saved(why):
    out = why([9] * 48)
    assert out.startswith("48 tokens: 0 hit, 48 missed\n")
    assert re.search(r"^never saved +48 +0$", out, re.M)


def test_where_a_prompt_diverges_and_agrees_again(why):
    out = why(EDITED)
    assert out.startswith("320 tokens: 100 hit (host 100), 220 missed\n")
    assert re.search(r"^diverged +diverges from a held prompt at token 100 +220 +100$", out, re.M)
    rows = {row[0]: row[1:] for row in map(str.split, out.splitlines()) if row}
    assert rows["token"] == [str(token) for token in range(100, 116)]
    assert rows["prompt"] == ["7"] * 6 + [str(token) for token in TOKENS[106:116]]
    assert rows["held"] == [str(token) for token in TOKENS[100:116]]
    assert out.endswith("\n6 tokens differ, then the same 214 follow\n")
    [miss] = why(EDITED, "--json")["misses"]
    assert miss["held_tokens"] == TOKENS[100:116]
    assert miss["rejoin"] == {
        "prompt_tokens": 6,
        "held_tokens": 6,
        "agreeing_tokens": 214,
        "more": False,
    }


def test_a_prompt_that_ends_soon_after_it_diverges(why):
    out = why(EDITED[:110])
    assert re.search(r"^prompt( +7){6} +106 +107 +108 +109( +–){6}$", out, re.M)
    assert out.endswith("the two do not agree again soon\n")


def test_a_prompt_held_under_another_revision(daemon, why):
    other = Identity.of(SPEC, model="m", revision="2")
    with tierstore.connect(daemon.url, SPEC, identity=other, lookup_s=5.0) as store:
        assert store.wait_connected(30)
        assert store.lookup(TOKENS).tokens == 0  # the daemon learns of the identity
        out = why(TOKENS, "--identity", other.digest.hex()[:8])
    assert out.startswith("320 tokens: 0 hit, 320 missed\n")
    assert re.search(r"^other identity +held under another .* differs in revision +320 +0$", out, re.M)


def test_a_model_with_several_layer_groups(daemon, why):
    save_groups(daemon.url)
    out = why([*TOKENS, 1], "--model", GROUPS_IDENTITY.model)
    assert out.startswith("321 tokens: 320 hit (host 320), 1 missed\n")
    assert why() == "no request has missed tokens since the daemon started\n"  # the order was searched


def test_asking_changes_no_counter(daemon, why):
    why([9] * 48)
    why(EDITED)
    counters = json.loads(run("stats", "--json", "--connect", daemon.url)[1])["store"]["counters"]
    assert (counters["lookups"], counters["missed_tokens"]) == (0, {})
    assert why() == "no request has missed tokens since the daemon started\n"


def test_the_last_requests_with_missed_tokens(daemon, why):
    daemon.store.lookup(TOKENS).release()
    daemon.store.lookup([9] * 48)
    evict(daemon, 2)
    daemon.store.lookup(TOKENS).release()
    wait_until(lambda: len(why().splitlines()) == 3)  # requests are noted after their answers
    head, newer, older = why().splitlines()
    assert re.match(r"client +model +reasons +age +tokens +hit$", head)
    assert re.match(r"tierstore client, pid \d+ +m +evicted 32 +\S+.* 320 +288$", newer)
    assert re.match(r"tierstore client, pid \d+ +m +never saved 48 +\S+.* 48 +0$", older)
    [request] = why(None, "--last", "1", "--json")["requests"]
    assert (request["prompt_tokens"], request["hit_tokens"]) == (320, 288)
    assert request["missed_tokens_by_reason"] == {"evicted": 32}


def test_no_line_is_wider_than_a_narrow_terminal(daemon, why, tmp_path):
    why(EDITED)
    terminal = Terminal("why", tmp_path / "tokens.json", "--connect", daemon.url, columns=80)
    try:
        out = terminal.wait_for(b" follow\r\n").decode()
    finally:
        terminal.end()
    assert "held" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("flags", [("--model", "m"), ("tokens.json", "--last", 3)])
def test_bad_usage_is_one_line(flags, tmp_path):
    (tmp_path / "tokens.json").write_text("1 2 3")
    flags = [tmp_path / flag if flag == "tokens.json" else flag for flag in flags]
    code, out, err = run("why", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
