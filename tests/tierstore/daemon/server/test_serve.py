"""``tierstore serve`` as a process: signals, logs, and the three documents over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.tierstore.daemon.server.client import Client, page_bytes, prompt_of
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import free_port
from tierstore.wire import messages as p

TOKENS = list(range(16 * 16))


@pytest.fixture
def serve(tmp_path):
    running = []

    def start(*flags, wait=True, **environment):
        process = subprocess.Popen(
            [sys.executable, "-m", "tierstore.daemon", "--listen", f"ipc://{tmp_path}/s", *flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        running.append(process)
        if wait:
            wait_until(lambda: (tmp_path / "s").exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate()[1]
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def get(port: int, path: str) -> tuple[int, str]:
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except urllib.error.URLError:
            time.sleep(0.05)
    raise AssertionError("no answer")


def test_a_second_sigterm_does_not_make_an_orderly_end_a_killed_one(serve):
    process = serve("--host-bytes", "4MiB")
    process.send_signal(signal.SIGTERM)
    while "ended" not in process.stderr.readline():
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # while it ends …
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)  # … and after it said so
        time.sleep(0.0005)
    assert process.returncode == 0


def test_sigterm_flushes_and_the_next_life_serves_what_was_committed(serve, tmp_path):
    flags = ("--host-bytes", "4MiB", "--disk", str(tmp_path / "d"), "--disk-bytes", "64MiB")
    process = serve(*flags, "--log-format", "json")
    client = Client(f"ipc://{tmp_path}/s")
    client.register()
    assert client.save(TOKENS).stored_tokens == len(TOKENS)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in errors.splitlines()]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    assert lines[-1]["message"] == "ended"
    assert client.arena.socket.recv(1) == b""
    client.close()

    serve(*flags)
    client = Client(f"ipc://{tmp_path}/s")
    client.register()
    found = client.lookup(prompt_of(TOKENS))
    assert found.tokens == len(TOKENS)
    assert client.load(found.lease, 16) == [page_bytes(TOKENS[:end]) for end in range(16, 257, 16)]
    client.close()


def test_sighup_takes_over_what_can_change(serve, tmp_path):
    file = tmp_path / "tierstore.toml"
    file.write_text('log_level = "info"\nhost_bytes = "4MiB"\n')
    process = serve("--config", str(file))
    file.write_text('log_level = "debug"\nhost_bytes = "8MiB"\n')
    client = Client(f"ipc://{tmp_path}/s")
    process.send_signal(signal.SIGHUP)
    while "need a restart: host_bytes" not in process.stderr.readline():
        assert process.poll() is None
    file.write_text("log_levle = 1\n")
    process.send_signal(signal.SIGHUP)
    while "nearest is 'log_level'" not in (line := process.stderr.readline()):
        assert process.poll() is None
    assert "the settings are unchanged" in line
    assert isinstance(client.ask(p.Ping(0)), p.Pong)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    client.close()


def test_bad_usage_is_one_line_and_exit_code_two(serve):
    process = serve(wait=False, TIERSTORE_HOST_BITES="1")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors.count("\n") == 1
    assert "TIERSTORE_HOST_BITES" in errors


def test_a_second_daemon_at_the_same_path_ends_with_one(serve):
    serve("--host-bytes", "4MiB")
    second = serve("--host-bytes", "4MiB", wait=False)
    _, errors = second.communicate()
    assert second.returncode == 1
    assert "listens at" in errors


def test_metrics_health_and_readiness(serve, tmp_path):
    port = free_port()
    serve("--host-bytes", "4MiB", "--metrics-port", str(port))
    client = Client(f"ipc://{tmp_path}/s")
    client.register()
    client.save(TOKENS)
    client.lookup(prompt_of(TOKENS))
    assert get(port, "/readyz") == (200, "ready\n")
    assert get(port, "/healthz")[0] == 200
    assert get(port, "/elsewhere")[0] == 404
    status, text = get(port, "/metrics")
    assert status == 200
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["tierstore_tenant_hit_tokens_total", (("tenant", ""), ("tier", "host"))] == len(TOKENS)
    assert samples["tierstore_hit_tokens_total", (("tier", "host"),)] == len(TOKENS)
    assert samples["tierstore_lookup_seconds_count", ()] == 1
    assert samples["tierstore_save_seconds_count", ()] == 2
    assert samples["tierstore_leases", ()] == 1
    assert samples["tierstore_tier_pages", (("tier", "host"),)] == 16
    stats = json.loads(client.ask(p.Stats(0)).json)
    assert stats["store"]["tiers"]["host"]["pages"] == 16
    assert stats["service"]["clients"][0]["leases"] == 1
    client.close()
