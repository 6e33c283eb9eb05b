"""Hosts as network namespaces on a bridge, with Mooncake's master on the first and a lender of memory on the
third. Needs root, `ip`, and Mooncake's wheel. Unix sockets are files, and reached from all of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MASTER = "10.78.0.1:50051"
PYTHON = os.environ.get("CLUSTER_PYTHON", sys.executable)  # of the environment that has Mooncake
_BIN = Path(PYTHON).parent
_READY_S = 30.0


def why_not() -> str:
    """Why this cannot be had here; empty if it can."""
    if _run(f"{PYTHON} -c 'import mooncake'"):
        return "Mooncake is not installed; make test-cluster"
    if os.geteuid() or shutil.which("ip") is None:
        return "namespaces need root and `ip`"
    allowed = _run("ip netns add tierstore-probe && ip netns del tierstore-probe") == 0
    return "" if allowed else "no namespaces here"


def _run(command: str) -> int:
    return subprocess.run(command, shell=True, check=False, stderr=subprocess.DEVNULL).returncode


def inside(host: int) -> tuple[str, ...]:
    """In front of a command that is to run on a host."""
    return ("ip", "netns", "exec", f"ts{host}")


class Network:
    """Three hosts, 10.78.0.1 to 3."""

    def __init__(self) -> None:
        self._logs = Path(tempfile.mkdtemp(prefix="ts-network-"))
        self.master: subprocess.Popen[bytes] | None = None
        self.lender: subprocess.Popen[bytes] | None = None
        self._remove()
        _run("ip netns add tsbr; ip -n tsbr link add br0 type bridge; ip -n tsbr link set br0 up")
        for host in (1, 2, 3):
            _run(f"ip netns add ts{host}")
            _run(f"ip link add tsv{host} netns tsbr type veth peer name eth0 netns ts{host}")
            _run(f"ip -n tsbr link set tsv{host} master br0 up")
            _run(f"ip -n ts{host} addr add 10.78.0.{host}/24 dev eth0")
            _run(f"ip -n ts{host} link set eth0 up; ip -n ts{host} link set lo up")
        self.start_master()
        self.start_lender()

    def start_master(self) -> None:
        flags = ("--rpc_address=10.78.0.1", "--rpc_port=50051", "--metrics_host=10.78.0.1")
        self.master = self._start(1, "mooncake_master", *flags, "--default_kv_lease_ttl=5s")
        self._wait("10.78.0.1", 50051)

    def start_lender(self) -> None:
        flags = ("--host=10.78.0.3", "--global_segment_size=512 MB", f"--master_server_address={MASTER}")
        self.lender = self._start(3, "mooncake_client", *flags, "--metadata_server=P2PHANDSHAKE")
        self._wait("10.78.0.3", 50052)

    def _start(self, host: int, program: str, *flags: str) -> subprocess.Popen[bytes]:
        with open(self._logs / program, "ab") as log:
            return subprocess.Popen([*inside(host), str(_BIN / program), *flags], stdout=log, stderr=log)

    def _wait(self, address: str, port: int) -> None:
        """Until somebody listens there: asked from within the network."""
        ends = time.monotonic() + _READY_S
        ask = f"import socket; socket.create_connection(('{address}', {port}), 1)"
        while _run(f'ip netns exec ts2 {sys.executable} -c "{ask}"'):
            assert time.monotonic() < ends, f"nobody listens at {address}:{port}: see {self._logs}"

    def slow(self, rate: str) -> None:
        """The lender's link from now on."""
        _run(f"ip netns exec ts3 tc qdisc replace dev eth0 root tbf rate {rate} burst 64kb latency 50ms")

    def stop_lender(self) -> None:
        self._signal(signal.SIGSTOP)

    def continue_lender(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.lender is not None
        self.lender.send_signal(number)  # `ip netns exec` has become the program

    def kill_master(self) -> None:
        assert self.master is not None
        self.master.kill()
        self.master.wait()

    def kill_lender(self) -> None:
        assert self.lender is not None
        self.lender.kill()
        self.lender.wait()

    def close(self) -> None:
        for process in (self.master, self.lender):
            if process is not None:
                process.kill()
                process.wait()
        self._remove()
        shutil.rmtree(self._logs, ignore_errors=True)

    def _remove(self) -> None:
        _run("for each in tsbr ts1 ts2 ts3; do ip netns del $each; done")
