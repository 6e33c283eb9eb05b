"""Settings from flags, environment and file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierstore.daemon.settings import Settings
from tierstore.errors import UsageError


def test_flags_go_before_the_environment_before_the_file_before_the_defaults(tmp_path):
    file = tmp_path / "tierstore.toml"
    file.write_text('host_bytes = "1GiB"\ndisk_bytes = 4096\nlease_s = 5\n[quotas]\nbob = "1MiB"\n')
    loaded = Settings.load(
        {"host_bytes": "3GiB", "listen": None},
        file=file,
        environment={"TIERSTORE_HOST_BYTES": "2GiB", "TIERSTORE_LEASE_S": "7", "HOME": "/"},
    )
    assert (loaded.host_bytes, loaded.lease_s, loaded.disk_bytes) == (3 << 30, 7.0, 4096)
    assert loaded.quotas == {"bob": 1 << 20}
    assert loaded.policy == "default"


@pytest.mark.parametrize(
    ("flags", "environment", "text", "message"),
    [
        ({}, {}, "hostbytes = 1", "nearest is 'host_bytes'"),
        ({}, {"TIERSTORE_HOST_BYTE": "1"}, "", "TIERSTORE_HOST_BYTE: .* nearest is 'host_bytes'"),
        ({}, {}, "host_bytes = 1.5", "host_bytes cannot be 1.5"),
        ({}, {}, "host_bytes = true", "host_bytes cannot be True"),
        ({}, {}, "host_bytes", "is not TOML"),
        ({"host_bytes": "much"}, {}, "", "not a size"),
        ({"policy": "mru"}, {}, "", "must be one of .*lru"),
        ({"log_level": "loud"}, {}, "", "must be one of debug"),
        ({"metrics_port": 70000}, {}, "", "a port must lie between"),
        ({"lease_s": 0.0}, {}, "", "lease_s is 0.0"),
        ({"listen": ""}, {}, "", "listen is empty"),
        ({"listen": ","}, {}, "", "a part between commas is empty"),
        ({"disk": ""}, {}, "", "--disk is empty"),
        ({"quotas": "bob"}, {}, "", "not a size"),
        ({"events": "a=ipc:///x,a=ipc:///y"}, {}, "", "one model has two endpoints"),
        ({"events": "a=ipc:///x", "events_replay": "ipc:///y"}, {}, "", "of all models, but events has none"),
        ({}, {}, "events = 1", "give URL, or MODEL=URL"),
        ({"events_tenants": "perhaps"}, {}, "", "give true or false"),
        ({"events_block_tokens": "1.5"}, {}, "", "give a whole number"),
        ({"reserve_bytes": "9GiB"}, {}, "", "more than host_bytes"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path, flags, environment, text, message):
    file = tmp_path / "tierstore.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        Settings.load(flags, file=file, environment=environment)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        Settings.load(file=tmp_path / "nowhere.toml", environment={})


def test_reloading_takes_what_can_change_and_names_the_rest():
    before = Settings(listen=("ipc:///a",), host_bytes=1 << 30)
    after = Settings(listen=("ipc:///b",), host_bytes=1 << 30, log_level="debug", quotas={"bob": 5})
    now, stuck = before.reloaded(after)
    assert (now.log_level, now.quotas, now.listen) == ("debug", {"bob": 5}, ("ipc:///a",))
    assert stuck == ["listen"]


def test_several_urls_and_quotas_in_one_flag():
    loaded = Settings.load(
        {"listen": "ipc:///a, tcp://127.0.0.1:1", "quotas": "bob=1MiB,eve=5", "disk": "/d"}, environment={}
    )
    assert loaded.listen == ("ipc:///a", "tcp://127.0.0.1:1")
    assert loaded.quotas == {"bob": 1 << 20, "eve": 5}
    assert loaded.disk == Path("/d")


def test_endpoints_of_events_by_model():
    both = {"Qwen/Qwen3-8B": "tcp://127.0.0.1:5557", "": "ipc:///run/a=b"}
    flag = ",".join(f"{model}={url}" if model else url for model, url in both.items())
    assert Settings.load({"events": flag}, environment={}).events == both
    assert Settings.load({}, environment={"TIERSTORE_EVENTS": flag}).events == both
    assert Settings.load({"events": both}, environment={}).events == both
    assert Settings.load({"events": ""}, environment={}).events == {}
    assert Settings.load({"events_anywhere": "TRUE"}, environment={}).events_anywhere is True


@pytest.mark.parametrize("variable", ["TIERSTORE_API_KEY", "TIERSTORE_OPERATOR_KEY"])
def test_variables_of_the_other_programs_are_passed_over(variable):
    assert Settings.load(environment={variable: "secret"}) == Settings.load(environment={})
