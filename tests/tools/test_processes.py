"""What other processes hold: the walk over their pages and the kernel's counters say the same."""

from __future__ import annotations

import mmap
import subprocess
import sys

from tierstore_tools.processes import memory_bytes, private_bytes, shared_bytes

PRIVATE, SHARED = 64 << 20, 32 << 20
_HOLDS = f"""
import mmap, subprocess, sys
held = bytearray(b"x") * {PRIVATE}
both = mmap.mmap(-1, {SHARED})
both.write(b"x" * {SHARED})
print("ready", flush=True)
sys.stdin.read()
"""
_PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_private_memory_of_a_family_is_told_from_what_it_shares():
    command = [sys.executable, "-c", _PARENT, _HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        pids = [process.pid]
        everything, private, shared = memory_bytes(pids), private_bytes(pids), shared_bytes(pids)
        process.stdin.close()
    assert PRIVATE <= private < PRIVATE + (48 << 20)  # and what two interpreters need
    assert SHARED <= shared < SHARED + mmap.PAGESIZE * 64
    assert private + shared <= everything < private + shared + (48 << 20)  # the rest is files


def test_a_process_that_has_ended_has_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert (memory_bytes([process.pid]), private_bytes([process.pid])) == (0, 0)
