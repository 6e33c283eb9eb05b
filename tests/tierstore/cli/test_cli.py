"""``tierstore fsck``, ``ls`` and ``doctor`` as a shell sees them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import typer.main

import tierstore
from tests.small_store import SPEC, load_bytes, pages_of
from tests.tierstore.cli.commands import run
from tests.tierstore.tiers.disk.test_damage import overwrite
from tierstore.cli.checks import Status, all_checks, packages
from tierstore.keys import Identity
from tierstore.units import GIB

PROMPTS = {"ann": list(range(160)), "bob": list(range(500, 564)), "": list(range(900, 970))}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")


def open_store(path, tenant):
    return tierstore.open(
        path,
        SPEC,
        identity=Identity.of(SPEC, model="llama", tenant=tenant),
        host_bytes=1 << 20,
        disk_bytes=16 << 20,
        inline_bytes=0,
    )


@pytest.fixture
def path(tmp_path):
    """A store with prompts of three tenants."""
    path = tmp_path / "kv"
    for tenant, tokens in PROMPTS.items():
        with open_store(path, tenant) as store:
            store.save(tokens, pages_of(tokens)).wait(10)
            assert store.flush(10)
    return path


def served_tokens(path):
    found = {}
    for tenant, tokens in PROMPTS.items():
        with open_store(path, tenant) as store:
            found[tenant], pages = load_bytes(store, store.lookup(tokens))
            assert pages == pages_of(tokens)[: len(pages)]
            store.check()
    return found


def damage(path, of):
    """Flip a byte in the first page of a prompt."""
    page = pages_of(of)[0]
    file = path / "extents" / "000000"
    at = file.read_bytes().index(page)
    overwrite(file, at + 100, bytes([page[100] ^ 1]))


def test_fsck_says_clean_or_what_is_wrong_and_repairs_it(path):
    code, out, err = run("fsck", path)
    assert (code, err) == (0, "")
    assert "19 of 19 pages are whole" in out
    assert out.endswith(f"{path}: clean\n")
    damage(path, PROMPTS["bob"])
    code, out, err = run("fsck", path)
    assert (code, err) == (1, "")
    assert "of llama (tenant bob), tokens 0–16" in out
    assert "1 damaged, 3 orphaned; tierstore fsck --repair would keep 15 pages and drop 4" in out
    code, out, err = run("fsck", path, "--repair")
    assert (code, err) == (0, "")
    assert "repaired (1 damaged, 3 orphaned): 15 pages kept, 4 dropped" in out
    assert run("fsck", path)[0] == 0
    assert served_tokens(path) == {"ann": 160, "bob": 0, "": 70}


def test_fsck_as_json(path):
    damage(path, PROMPTS[""])
    code, out, err = run("fsck", path, "--json")
    report = json.loads(out)
    assert (code, err) == (1, "")
    assert (report["damaged"], report["orphaned"], report["misplaced"], report["unaccounted"]) == (1, 4, 0, 0)
    assert report["by_kind"]["damaged"] == {"payload": 1}
    assert (report["pages"], report["good_pages"], report["clean"], report["repaired"]) == (
        19,
        14,
        False,
        False,
    )
    assert report["verified_bytes"] == 18 * SPEC.page_bytes
    assert report["gb_per_s"] > 0
    assert report["run_s"] >= report["payloads_s"] > 0
    finding = report["findings"][0]
    assert finding["kind"] == "payload"
    assert (finding["model"], finding["tenant"]) == ("llama", "")
    assert (finding["start_tokens"], finding["stop_tokens"]) == (0, 16)
    assert json.loads(run("fsck", path, "--repair", "--json")[1])["clean"]


def test_ls(path):
    code, out, err = run("ls", path)
    assert (code, err) == (0, "")
    assert "ann" in out
    assert "19 pages, 152 KiB" in out
    code, out, err = run("ls", path, "--json")
    listing = json.loads(out)
    assert (code, err) == (0, "")
    assert (listing["pages"], listing["prompts"], listing["stored_tokens"]) == (19, 3, 294)
    by_tenant = {each["tenant"]: each for each in listing["identities"]}
    assert {tenant: each["stored_tokens"] for tenant, each in by_tenant.items()} == {
        tenant: len(tokens) for tenant, tokens in PROMPTS.items()
    }
    assert by_tenant["ann"]["payload_bytes"] == 10 * SPEC.page_bytes
    assert abs(by_tenant["ann"]["newest_s"] - time.time()) < 60


def test_a_store_in_use_is_neither_listed_nor_checked(path):
    with open_store(path, "ann"):
        code, out, err = run("ls", path)
        assert (code, out) == (1, "")
        assert f"in use by process {os.getpid()}: ask it with `tierstore stats`" in err
        code, out, err = run("fsck", path, "--repair")
        assert (code, out) == (1, "")
        assert err == (
            f"tierstore: {path} is in use by process {os.getpid()}: stop it, or give another directory\n"
        )


@pytest.mark.parametrize("command", ["fsck", "ls"])
def test_what_is_no_store_is_bad_usage(tmp_path, command):
    code, out, err = run(command, tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "holds no store" in err
    assert os.listdir(tmp_path) == []


def test_doctor(tmp_path):
    code, out, _ = run("doctor", tmp_path, "--host-bytes", "900TiB", "--json")
    report = json.loads(out)
    checks = {check["name"]: check for check in report["checks"]}
    assert (checks["arena"]["status"], checks["arena"]["host_bytes"]) == ("warn", 900 << 40)
    assert code == (1 if report["failed"] else 0)
    names = {"python", "lmdb", "compiled part", "/dev/shm", "locked memory", "open files", "GPU", "O_DIRECT"}
    assert names <= checks.keys()
    assert checks["python"]["status"] == "ok"
    assert checks["free space"]["free_bytes"] > 0
    assert all(check["advice"] for check in checks.values() if check["status"] != "ok")
    assert os.listdir(tmp_path) == []


def test_doctor_fails_where_no_store_can_be(tmp_path):
    (tmp_path / "file").touch()
    code, out, _ = run("doctor", tmp_path / "file")
    assert code == 1
    assert "fail" in out
    found = {check.name: check for check in all_checks(tmp_path / "not" / "yet", GIB)}
    assert found["directory"].status is Status.OK
    found = {check.name: check for check in all_checks(Path("/proc"), GIB)}
    assert found["directory"].status is Status.FAIL


def test_a_package_that_is_missing_or_old_is_a_failure():
    assert packages._package("no-such-package>=2").status is Status.FAIL
    assert packages._package("numpy>=999").status is Status.FAIL
    assert packages._package("numpy>=1.24").status is Status.OK


def test_help_and_version_are_quick_and_need_no_torch():
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("tierstore 0.")
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"\n  {command} " in out for command in ("fsck", "ls", "doctor"))
    code, out, _ = run("serve", "--help")
    out = " ".join(out.split())
    assert code == 0
    assert all(f"[default: {value}]" in out for value in ("8GiB", "100GiB", "60", "127.0.0.1", "info"))
    code = "import sys, tierstore.cli; sys.exit(any(name in sys.modules for name in ('torch', 'rich.table')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PROGRAMS = ("tierstore.cli", "tierstore_engine.cli", "tierstore_proxy.cli", "tierstore_tools.cli")


@pytest.mark.parametrize("program", PROGRAMS)
def test_summaries_of_commands_fit_a_narrow_terminal(program):
    """``--help`` cuts longer ones off, with three dots."""

    def too_long(command: click.Command) -> list[str]:
        commands = getattr(command, "commands", {}).values()
        summaries = [(each.help or "").strip().partition("\n")[0] for each in commands]
        return [text for text in summaries if len(text) > 60] + [
            t for each in commands for t in too_long(each)
        ]

    assert too_long(typer.main.get_command(importlib.import_module(program).app)) == []
