"""``tierstore stats``, ``top`` and ``evict`` against a daemon in a process of its own, and the documents that
say how to run one."""

from __future__ import annotations

import configparser
import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.daemons import daemon_stats
from tests.tierstore.cli.commands import PAGES, TOKENS, Terminal, command, run
from tierstore.cli.operator import Operator
from tierstore.cli.stats import quantile
from tierstore.cli.top import view
from tierstore.daemon.background import checked_choice
from tierstore.daemon.metrics import StatsCollector
from tierstore.daemon.settings import SETTINGS, Settings
from tierstore.daemon.stats import BOUNDS_S, LatencyStats, Slowest
from tierstore.errors import StoreUnavailableError
from tierstore.stats import ClusterStats
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess, free_port
from tierstore.units import parse_size
from tierstore.wire import keys, messages

DOCS = Path(__file__).parents[3] / "docs"


def test_stats_as_json_are_what_the_daemon_says(daemon):
    daemon.store.lookup([*TOKENS, 1]).release()
    code, out, err = run("stats", "--connect", daemon.url, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["pid"] == daemon.process.pid
    assert document["store"]["tiers"]["host"]["pages"] == PAGES
    assert document["store"]["counters"]["hit_tokens"]["host"] == len(TOKENS)
    assert document["service"]["requests"]["FindHit"] == 1


def test_stats_as_a_table_leave_out_what_is_zero(daemon):
    daemon.store.lookup([*TOKENS, 1]).release()
    # A release is a message without an answer.
    wait_until(lambda: not daemon_stats(daemon.store)["service"]["leases"])
    code, out, err = run("stats", "--connect", daemon.url)
    assert (code, err) == (0, "")
    assert re.search(rf"^host +4 MiB .* {PAGES} .* {len(TOKENS)} ", out, re.M)
    assert "health: disk: online" in out
    assert "hit rate 99.7 % of 321 requested tokens" in out
    assert "clients 1, leases 0" in out
    assert f"pid {os.getpid()}" in out
    assert re.search(rf"^saved pages +{PAGES}$", out, re.M)
    assert "damaged" not in out
    assert "no tokens were missed in the last hour" not in out


def test_the_curve_says_what_more_memory_would_be_worth(daemon):
    assert run("stats", "--connect", daemon.url, "--curve") == (
        0,
        "no estimate yet: there were no lookups\n",
        "",
    )
    for _ in range(3):
        daemon.store.lookup(TOKENS).release()
    daemon.store.flush(10)
    code, out, err = run("stats", "--connect", daemon.url, "--curve")
    assert (code, err) == (0, "")
    assert "hit rate 100.0 % since the start; at best 100.0 %, with 8 GiB" in out
    assert re.search(r"^4 MiB +100.0 % +host$", out, re.M)
    assert re.search(r"^256 MiB +100.0 % +disk$", out, re.M)
    assert re.search(r"^host +4 MiB +100.0 % +\+4 MiB +\+0.0$", out, re.M)
    code, out, err = run("stats", "--connect", daemon.url, "--curve", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["ceiling"] == 1.0
    assert document["asked_tokens"] == 3 * len(TOKENS)
    assert document["tiers"]["host"]["more"][0].keys() == {"share", "added_bytes", "added_hit_rate"}
    assert {"capacity_bytes": 4 << 20, "hit_rate": 1.0} in document["points"]


def test_an_operators_session_ends_with_it(daemon):
    with Operator(daemon.url) as operator:
        assert operator.stats().service.connections == 2
    with Operator(daemon.url) as operator:
        wait_until(lambda: operator.stats().service.connections <= 2)  # at once: the daemon has missed nobody
        assert operator.stats().server.silent_clients == 0


@pytest.mark.parametrize("verb", [("stats",), ("stats", "--json"), ("top",), ("evict", "host")])
def test_no_daemon_is_one_line_and_exit_code_one(directory, verb):
    code, out, err = run(*verb, "--connect", f"ipc://{directory}/s")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "tierstore serve" in err


@pytest.mark.parametrize("verb", [("stats", "--connect", "localhost"), ("evict", "hbm")])
def test_bad_usage_is_one_line_and_exit_code_two(verb):
    code, out, err = run(*verb)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_daemon_that_hangs_or_ends_is_not_waited_for(daemon):
    with Operator(daemon.url) as operator:
        daemon.signal(signal.SIGSTOP)
        code, _, err = run("stats", "--connect", daemon.url)
        assert (code, err.count("\n")) == (1, 1)
        daemon.kill()
        with pytest.raises(StoreUnavailableError, match="has ended"):
            operator.ask(messages.Stats(0), messages.StatsAnswer, wait_s=30)


@pytest.fixture
def keyed(directory):
    """A daemon that lets the keys in ``tenants/`` in by TCP, and how to ask it with a key."""
    keys.generate(directory, "daemon")
    keys.generate(directory / "tenants", "ops")
    url = f"tcp://127.0.0.1:{free_port()}"
    process = DaemonProcess(
        directory,
        f"--server-key={directory}/daemon.secret",
        f"--tenants={directory}/tenants",
        listen=[url],
    ).start()
    process.tcp = url
    where = ("--connect", process.tcp, "--server-key", directory / "daemon.key")

    def ask_as(secret):
        return run("stats", "--json", *where, "--keys", secret)[0] == 0

    wait_until(lambda: ask_as(directory / "tenants" / "ops.secret"))
    yield process, ask_as
    process.kill()


def test_over_tcp_with_keys(keyed, directory):
    daemon, ask_as = keyed
    keys.generate(directory, "stranger")
    assert not ask_as(directory / "stranger.secret")
    with Operator(daemon.tcp, directory / "tenants" / "ops.secret", directory / "daemon.key") as operator:
        clients = json.loads(operator.stats_json())["service"]["clients"]
    assert {client["tenant"] for client in clients} == {"ops"}


def test_a_tenant_is_shown_its_own_part(keyed, directory):
    daemon, _ = keyed
    where = ("--connect", daemon.tcp, "--server-key", directory / "daemon.key")
    secret = ("--keys", directory / "tenants" / "ops.secret")
    code, out, err = run("stats", *where, *secret)
    assert (code, err) == (0, "")
    assert re.search(r"^ops +0 +0 +– +0 B +– +0 B$", out, re.M)
    for verb in (("top",), ("stats", "--curve")):
        code, out, err = run(*verb, *where, *secret)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "only its own statistics" in err


def test_sighup_lets_new_keys_in_and_old_ones_no_more(keyed, directory):
    daemon, ask_as = keyed
    ops = directory / "tenants" / "ops.secret"
    secret, public = keys.generate(directory, "new")
    assert not ask_as(secret)
    public.rename(directory / "tenants" / "new.key")
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: ask_as(secret))
    (directory / "tenants" / "ops.key").unlink()
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: not ask_as(ops))
    assert ask_as(secret)


def test_sighup_ends_the_sessions_of_tenants_whose_key_has_gone(keyed, directory):
    daemon, _ = keyed
    tenants = directory / "tenants"
    with Operator(daemon.tcp, tenants / "ops.secret", directory / "daemon.key") as operator:
        assert operator.stats_json()
        (tenants / "ops.key").unlink()
        daemon.signal(signal.SIGHUP)
        with pytest.raises(StoreUnavailableError, match="say Hello first"):  # noqa: PT012
            while True:
                operator.stats_json()
        with pytest.raises(StoreUnavailableError, match="no longer admitted"):
            operator.ask(messages.Hello(0, b"", "ops"), messages.Welcome)


def test_a_settings_file_that_takes_its_time_holds_nobody_up(directory):
    file = directory / "tierstore.toml"
    file.write_text('log_level = "info"\n')
    process = subprocess.Popen(
        command("serve", "--config", file, "--host-bytes", "4MiB", "--listen", f"ipc://{directory}/s"),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while "serves" not in process.stderr.readline():
            assert process.poll() is None
        file.unlink()
        os.mkfifo(file)
        process.send_signal(signal.SIGHUP)
        with open(file, "w") as pipe:  # as soon as the daemon reads
            with Operator(f"ipc://{directory}/s") as operator:
                assert operator.stats().ready
            pipe.write("drain_s = 7.0\n")
        while "settings reloaded" not in process.stderr.readline():
            assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_an_answer_of_another_version_is_said_to_be_one(directory):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        asking = subprocess.Popen(
            command("stats", "--connect", f"tcp://127.0.0.1:{port}"), stderr=subprocess.PIPE, text=True
        )
        peer, *_ = router.recv_multipart()
        router.send_multipart([peer, b"\x09", b"something else"])
        _, err = asking.communicate(timeout=30)
        assert (asking.returncode, err.count("\n")) == (1, 1)
        assert "version" in err


def test_quantiles_are_bounds():
    none = LatencyStats((0,) * (len(BOUNDS_S) + 1), 0.0)
    assert quantile(none, 0.5) == "–"
    some = replace(none, counts=(90, 0, 9, *none.counts[3:-1], 1))
    assert [quantile(some, share) for share in (0.5, 0.99, 1.0)] == ["≤ 0.1 ms", "≤ 0.5 ms", "> 5000 ms"]


def test_the_slowest_of_the_last_minute_is_kept():
    slowest = Slowest()
    assert slowest.stats(5.0) == {}
    for at, seconds in ((100, 0.2), (101, 0.5), (110, 0.3)):
        slowest.add("Load", seconds, at)
    slowest.add("Commit", 0.6, 112)
    assert list(slowest.stats(120).items()) == [("Commit", 0.6), ("Load", 0.5)]
    slowest.add("Load", 0.7, 135)
    slowest.add("Commit", 0.1, 136)
    assert slowest.stats(140) == {"Load": 0.7, "Commit": 0.6}
    assert slowest.stats(170) == {"Load": 0.7, "Commit": 0.1}
    assert slowest.stats(196) == {}
    slowest.add("Load", 0.1, 1000)
    assert slowest.stats(1000) == {"Load": 0.1}


@pytest.mark.parametrize("flags", [(), ("--once",)])
def test_top_off_a_terminal_is_one_snapshot(daemon, flags):
    code, out, err = run("top", "--connect", daemon.url, *flags)
    assert (code, err) == (0, "")
    assert out.count("health: disk: online") == 1
    assert re.search(rf"^host .* 4 MiB +{PAGES} ", out, re.M)
    assert re.search(r"^slowest in the last minute: .*\b(Reserve|Commit) \d+\.\d ms", out, re.M)


def test_missed_tokens_by_reason(daemon):
    where = ("--connect", daemon.url)
    for verb in ("stats", "top"):
        assert "no tokens were missed in the last hour" in run(verb, *where)[1]
    daemon.store.lookup([9] * 48)
    run("evict", "host", *where)
    run("evict", "disk", "--pages", 1, *where)
    daemon.store.lookup(TOKENS).release()

    def document():
        return json.loads(run("stats", "--json", *where)[1])["store"]

    wait_until(lambda: document()["missed_last_hour"] == {"never_saved": 48, "evicted": 16})
    assert document()["counters"]["missed_tokens"] == {"never_saved": 48, "evicted": 16}
    table = (
        r"^missed tokens by reason, last hour +tokens +of missed\r?\n"
        r"never saved +48 +75\.0 %\r?\n"
        r"evicted +16 +25\.0 %\r?$"
    )
    for verb in ("stats", "top"):
        assert re.search(table, run(verb, *where)[1], re.M), verb
    terminal = Terminal("top", *where, columns=80)
    try:
        shown = terminal.wait_for(b"25.0 %").decode()
    finally:
        terminal.end()
    assert re.search(r"missed tokens by reason, last hour +tokens +of missed\s", shown)


def test_rates_are_those_since_the_last_look(daemon):
    with Operator(daemon.url) as operator:
        before = operator.stats()
        daemon.store.lookup([*TOKENS, 1]).release()
        daemon.store.lookup([7] * 321)
        now = operator.stats()
        lines = [getattr(each, "plain", "") for each in view(operator, now, before, 2.0).renderables]
        assert "hit rate 49.8 % now, 49.8 % in total" in lines
        assert "lookups/s 1.0, pages on their way to disk 0" in lines
        lines = [getattr(each, "plain", "") for each in view(operator, now, now, 1.0).renderables]
        assert "hit rate – now, 49.8 % in total" in lines


def test_top_on_a_terminal_outlives_the_daemon_and_ends_with_q(daemon):
    terminal = Terminal("top", "--connect", daemon.url)
    try:
        for _ in range(2):
            terminal.wait_for(b" now, ")  # not the first view
        daemon.kill()
        terminal.wait_for(b"trying again")
        daemon.start()
        terminal.wait_for(b"since the start")
        os.write(terminal.fd, b"xq")
        terminal.has_ended()
    finally:
        terminal.end()


def test_top_on_a_terminal_ends_with_an_interrupt(daemon):
    terminal = Terminal("top", "--connect", daemon.url)
    try:
        terminal.wait_for(b" now, ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.has_ended()
    finally:
        terminal.end()


def test_evict_lets_as_many_leave_as_asked_for(daemon):
    where = ("--connect", daemon.url)
    assert run("evict", "host", "--pages", 3, *where) == (0, "3 pages have left host\n", "")
    assert run("evict", "host", *where) == (0, f"{PAGES - 3} pages have left host\n", "")
    with daemon.store.lookup(TOKENS) as hit:
        assert hit.by_tier == {"disk": len(TOKENS)}
    assert daemon.store.flush(30)  # leases are released before any other request
    assert run("evict", "disk", *where) == (0, f"{PAGES} pages have left disk\n", "")
    assert daemon.store.lookup(TOKENS).tokens == 0


def test_the_protocols_document_names_every_message_field_and_limit():
    text = (DOCS / "protocol.md").read_text()
    classes = [
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, messages.Message) and each is not messages.Message
    ]
    assert len(classes) > 30
    for each in classes:
        signature = f"`{each.__name__}({', '.join(each.__struct_fields__)})`"
        assert signature in text, signature
    for name in ("MAX_MESSAGE_BYTES", "MAX_CHUNKS", "MAX_IDENTITY_BYTES", "MAX_FETCH_BYTES"):
        assert f"| `{name}` | {getattr(messages, name):,} |" in text, name
    for name in ("PING_S", "SILENCE_S"):
        assert f"| `{name}` | {getattr(messages, name):g} |" in text, name


def test_the_example_settings_are_settings_and_all_of_them():
    file = DOCS / "deploy" / "tierstore.toml"
    settings = Settings.load(file=file, environment={})
    assert settings.disk is not None
    named = re.findall(r"^#?(\w+) =", file.read_text(), re.M)
    assert sorted(named) == sorted(SETTINGS)


def test_the_unit_starts_with_the_example_settings():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DOCS / "deploy" / "tierstore.service")
    service = unit["Service"]
    assert service["ExecStart"].endswith("tierstore serve --config /etc/tierstore/tierstore.toml")
    assert service["LimitMEMLOCK"] == "infinity"
    settings = Settings.load(file=DOCS / "deploy" / "tierstore.toml", environment={})
    assert settings.listen[0].startswith(f"ipc:///run/{service['RuntimeDirectory']}/")
    assert str(settings.disk).startswith(f"/var/lib/{service['StateDirectory']}/")
    assert float(service["TimeoutStopSec"]) > settings.drain_s


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_dashboards_and_alerts_ask_for_metrics_that_there_are(daemon, name):
    text = (DOCS / "deploy" / name).read_text()
    with Operator(daemon.url) as operator:
        stats = operator.stats()
    cluster = ClusterStats("mooncake://x", True, "", "tcp", 0.0, {})
    known: dict[str, set[str]] = {}
    for metric in StatsCollector(lambda: replace(stats, cluster=cluster)).collect():
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
        labels = {label for sample in metric.samples for label in sample.labels} | {"instance"}
        known.update({metric.name + ending: labels for ending in endings})
    asked = set(re.findall(r"\btierstore_\w+", text))
    assert asked, "nothing is asked for"
    assert asked <= known.keys()
    for label, metric_name in re.findall(r"by \((\w+)\) \(rate\((tierstore_\w+)", text):
        assert label in known[metric_name], (label, metric_name)


def daemon_flags(arguments):
    """The settings that these arguments of `tierstore serve` give."""
    flags = dict(each.removeprefix("--").replace("-", "_").split("=", 1) for each in arguments)
    return Settings.load({name: [value] if name == "listen" else value for name, value in flags.items()})


def test_the_kubernetes_manifest_is_valid():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((DOCS / "deploy" / "kubernetes.yaml").read_text())
    kubernetes_validate.validate(manifest, "1.33", strict=True)
    pod = manifest["spec"]["template"]["spec"]
    [container] = pod["containers"]
    settings = daemon_flags(container["args"])
    limit = parse_size(container["resources"]["limits"]["memory"] + "B")
    assert settings.host_bytes + (2 << 30) <= limit
    assert pod["terminationGracePeriodSeconds"] > settings.drain_s


def test_the_compose_file_starts_the_daemon_as_it_is():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((DOCS / "deploy" / "compose.yaml").read_text())["services"]
    words = services["tierstore"]["command"].split()
    arguments = [f"{flag}={value}" for flag, value in zip(words[::2], words[1::2], strict=True)]
    assert daemon_flags(arguments).host_bytes < parse_size("10GiB")
    store = services["vllm"]["environment"]["TIERSTORE"]
    assert checked_choice(store) == store == daemon_flags(arguments).listen[0]
    assert {name.split(":")[0] for each in services.values() for name in each["volumes"]} == {
        "socket",
        "pages",
    }


def test_the_dashboard_can_be_read():
    document = json.loads((DOCS / "deploy" / "grafana.json").read_text())
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"]) > 5
    for panel in document["panels"]:
        assert panel["targets"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_the_operators_document_names_every_metric_and_setting(daemon):
    text = (DOCS / "operations.md").read_text()
    with Operator(daemon.url) as operator:
        stats = operator.stats()
    for metric in StatsCollector(lambda: stats).collect():
        assert f"`{metric.name}" in text, metric.name
    for name in SETTINGS:
        assert f"`{name}`" in text, name
