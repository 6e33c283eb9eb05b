"""How much memory there is, by /proc and by the control groups that a container is made of."""

from pathlib import Path

import pytest

from tierstore import machine
from tierstore.cli import checks
from tierstore.cli.checks import Status
from tierstore.units import GIB, MIB


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Write files as the kernel shows them, below a folder."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {9 * GIB // 1024} kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", meminfo)
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "_GROUP_ROOT", tmp_path / "cgroup")

    def write(groups: str, **files: str) -> None:
        (tmp_path / "groups").write_text(groups)
        for name, text in files.items():
            file = tmp_path / "cgroup" / Path(name.replace("__", "/").replace("DOT", "."))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

    return write


def test_without_a_limit_the_machine_counts(tree):
    tree("0::/\n", memoryDOTmax="max")
    assert machine.memory_bytes() == (16 * GIB, 9 * GIB, None)


@pytest.mark.parametrize("seen_as_root", [True, False])
def test_version_2(tree, seen_as_root):
    prefix = "" if seen_as_root else "kube__pod__"
    tree(
        "0::/kube/pod/a\n",
        **{
            f"{prefix}memoryDOTmax": str(512 * MIB),
            f"{prefix}memoryDOTcurrent": str(400 * MIB),
            f"{prefix}memoryDOTstat": f"anon 5\ninactive_file {100 * MIB}",
        },
    )
    assert machine.memory_bytes() == (512 * MIB, 212 * MIB, 512 * MIB)


def test_version_1_and_the_lowest_limit_counts(tree):
    tree(
        "5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n",
        memory__memoryDOTlimit_in_bytes=str(2**63 - 4096),
        memory__a__memoryDOTlimit_in_bytes=str(200 * MIB),
        memory__a__memoryDOTusage_in_bytes=str(50 * MIB),
        memory__a__b__memoryDOTlimit_in_bytes=str(300 * MIB),
        memory__a__b__memoryDOTusage_in_bytes=str(10 * MIB),
    )
    assert machine.memory_bytes() == (200 * MIB, 150 * MIB, 200 * MIB)


@pytest.mark.parametrize("version", [1, 2])
def test_the_doctor_says_that_the_arena_is_beyond_the_limit(tree, version):
    if version == 1:
        tree("4:memory:/a\n", memory__a__memoryDOTlimit_in_bytes=str(4 * GIB))
    else:
        tree("0::/\n", memoryDOTmax=str(4 * GIB))

    def arena(nbytes: int) -> checks.Check:
        return next(check for check in checks.all_checks(None, nbytes) if check.name == "arena")

    assert arena(4 * GIB).status is Status.OK
    assert arena(5 * GIB).status is Status.WARN
    assert "host_bytes 5 GiB, memory limit of this container 4 GiB" in arena(5 * GIB).found
    tree("0::/\n", memoryDOTmax="max", memory__a__memoryDOTlimit_in_bytes="max")
    assert arena(16 * GIB).status is Status.OK
    assert "host_bytes 17 GiB, memory 16 GiB" in arena(17 * GIB).found
