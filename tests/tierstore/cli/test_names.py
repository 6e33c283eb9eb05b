"""Names that models, tenants and clients have chosen to look like something else, wherever they are shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import tierstore
from tests.small_store import SPEC, pages_of
from tests.tierstore.cli.commands import Reporting, Terminal, run
from tests.tierstore.daemon.server.client import Client
from tests.tierstore.tiers.disk.test_damage import overwrite
from tierstore.keys import Identity
from tierstore.testing.processes import DaemonProcess
from tierstore.wire import messages

# Clears the screen, begins a line of its own, turns text around, is markup to some.
NAME = "a\x1b[2J\r\n2026-01-01 00:00:00,000 ERROR   forged\u202e\u2028\x9b2J[red]z"
SHOWN = "a\\x1b[2J\\r\\n2026-01-01 00:00:00,000 ERROR   forged\\u202e\\u2028\\x9b2J[red]z"
TOKENS = list(range(64))


def is_plain(text):
    return all(character.isprintable() for character in text.replace("\n", ""))


def unwrapped(text):
    """Without the line ends and the padding of a table's cells."""
    return re.sub(r"\s+", "", text)


@pytest.fixture
def path(tmp_path):
    """A store with a damaged page of a model with that name."""
    path = tmp_path / "kv"
    identity = Identity.of(SPEC, model=NAME, tenant=NAME[1:])
    with tierstore.open(path, SPEC, identity=identity, disk_bytes=16 << 20, inline_bytes=0) as store:
        store.save(TOKENS, pages_of(TOKENS)).wait(10)
        assert store.flush(10)
    page = pages_of(TOKENS)[1]
    file = path / "extents" / "000000"
    overwrite(file, file.read_bytes().index(page), bytes([page[0] ^ 1]))
    return path


@pytest.mark.parametrize("verb", ["ls", "fsck"])
def test_in_a_store(path, verb):
    _, out, err = run(verb, path)
    assert err == ""
    assert is_plain(out)
    assert unwrapped(SHOWN)[:20] in unwrapped(out)
    assert not re.search(r"^2026-01-01", out, re.M)
    _, out, _ = run(verb, path, "--json")
    assert is_plain(out)
    named = json.loads(out)["identities" if verb == "ls" else "findings"][0]
    assert (named["model"], named["tenant"]) == (NAME, NAME[1:])


def greet(daemon, name):
    client = Client(daemon.url, hello=False)
    assert isinstance(client.ask(messages.Hello(0, client.arena.token, name)), messages.Welcome)
    return client


@pytest.mark.parametrize("verb", ["stats", "top"])
def test_of_a_client(daemon, verb):
    client = greet(daemon, NAME)
    code, out, err = run(verb, "--connect", daemon.url)
    assert (code, err) == (0, "")
    assert is_plain(out)
    assert "ERROR   forged" in out
    assert not re.search(r"^2026-01-01", out, re.M)
    client.close()


def test_on_a_terminal(daemon):
    client = greet(daemon, NAME)
    terminal = Terminal("top", "--connect", daemon.url)
    try:
        seen = terminal.wait_for(b" now, ")
        assert SHOWN[:12].encode() in seen
        assert b"\x1b[2J\r\n2026" not in seen
    finally:
        terminal.end()
        client.close()


def test_in_an_error(daemon, tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    client = greet(daemon, "test")
    client.register(replace(Identity.of(SPEC, model=NAME), adapter="other"))
    code, out, err = run("pin", tokens, "--connect", daemon.url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert is_plain(err)
    client.close()


@pytest.mark.parametrize("form", ["plain", "json"])
def test_in_the_log(directory, form):
    flags = ("--host-bytes", "4MiB", "--log-format", form, "--listen", f"ipc://{directory}/s")
    process = Reporting("serve", *flags)
    lines = []
    try:
        while not any("serves" in line for line in lines):
            lines.append(process.said.readline())
            assert lines[-1]
        daemon = DaemonProcess(directory)
        greet(daemon, NAME).close()
        while "ended" not in lines[-1]:
            lines.append(process.said.readline())
    finally:
        process.close()
    said = next(line for line in lines if "forged" in line)
    assert all(is_plain(line) for line in lines)
    if form == "json":
        assert json.loads(said)["message"].endswith(SHOWN)
    else:
        assert said.endswith(f"{SHOWN}\n")
        assert not any(line.startswith("2026-01-01") for line in lines)
