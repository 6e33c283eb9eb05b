"""Whole engines: what one has computed another has, and whatever happens to the store the answers stay
right."""

from __future__ import annotations

import shutil

import pytest

from tests.sglang.engine import Server, ask, write_adapter

pytestmark = pytest.mark.timeout(1500)  # an engine starts in 10 s on an idle machine


def same(one, other):
    return [(each.tokens, each.logprobs) for each in one] == [(each.tokens, each.logprobs) for each in other]


@pytest.fixture(scope="module")
def without(model):
    """The answers of an engine without a store."""
    return ask(model, None)


def damage(daemon):
    """Change a byte in every KiB of all pages."""
    files = list((daemon.disk / "extents").iterdir())
    assert files, "no page is in an extent"
    for file in files:
        data = bytearray(file.read_bytes())
        data[100::1024] = bytes(each ^ 0xFF for each in data[100::1024])
        file.write_bytes(data)


def test_an_engine_and_its_daemon_come_back_after_kill_9(model, daemon, without):
    assert same(ask(model, daemon.url), without)
    daemon.flush()
    daemon.kill()
    daemon.start()
    warm = ask(model, daemon.url)
    assert warm[0].stored == 192  # of 200, in pages of 16
    assert same(warm, without)


def test_damaged_pages_are_computed_again(model, daemon, without):
    assert same(ask(model, daemon.url), without)
    daemon.flush()
    daemon.kill()
    damage(daemon)
    daemon.start()
    warm = ask(model, daemon.url)
    assert warm[0].stored == 0
    assert same(warm, without)
    assert ask(model, daemon.url)[0].stored == 192  # they were saved again


def test_two_ranks_and_staging_only(model, daemon):
    options = {"ranks": 2, "hicache_host_memory_mode": "buffer_only"}
    alone = ask(model, None, ranks=2)
    assert same(ask(model, daemon.url, **options), alone)
    warm = ask(model, daemon.url, **options)
    assert warm[0].stored == 192
    assert same(warm, alone)


def test_an_engine_without_its_daemon_computes(model, tmp_path, without):
    assert same(ask(model, f"ipc://{tmp_path}/nobody"), without)


def test_a_server_attaches_and_detaches_the_storage_while_it_runs(model, daemon, without):
    expected = without[0].tokens
    with Server(model) as server:
        assert server.generate(200) == (expected, 0)
        server.flush()
        server.attach(daemon.url)
        assert server.generate(200) == (expected, 0)  # computed, and saved
        server.detach()
        server.flush()
        assert server.generate(200) == (expected, 0)  # no storage, nothing comes
        server.flush()
        server.attach(daemon.url)
        assert server.generate(200) == (expected, 192)


LORA = {"lora_backend": "torch_native", "max_loras_per_batch": 2}


def test_an_adapter_that_was_overwritten_gets_no_page_of_the_old_one(model, daemon, tmp_path):
    folder = tmp_path / "adapter"
    started = {**LORA, "lora_paths": [f"tuned={folder}"], "adapter": "tuned"}
    write_adapter(folder, seed=1)
    first = ask(model, daemon.url, **started)
    assert first[0].stored == 0
    again = ask(model, daemon.url, **started)
    assert again[0].stored == 192
    assert same(again, first)
    write_adapter(folder, seed=2)  # names, sizes and times are as before
    other = ask(model, daemon.url, **started)
    assert other[0].stored == 0
    assert same(other, ask(model, None, **started))
    assert other[0].logprobs != first[0].logprobs


def test_an_adapter_that_is_loaded_while_the_server_runs_is_found_after_a_restart(model, daemon, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_adapter(one, seed=1)
    write_adapter(two, seed=2)
    options = {**LORA, "enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]}

    def loaded(folder, store=daemon.url):
        return ask(model, store, load={"tuned": str(folder)}, adapter="tuned", **options)

    first = loaded(one)
    assert first[0].stored == 0
    again = loaded(one)
    assert again[0].stored == 192
    assert same(again, first)
    other = loaded(two)  # under the same name
    assert other[0].stored == 0
    assert other[0].logprobs != first[0].logprobs
    one.rename(tmp_path / "elsewhere")
    assert loaded(tmp_path / "elsewhere")[0].stored == 192


def test_the_same_deployment_with_other_ports_names_and_sizes_hits(model, daemon, without, tmp_path):
    assert ask(model, daemon.url)[0].stored == 0
    warm = ask(
        model,
        daemon.url,
        host="127.0.0.2",
        port=31999,
        nccl_port=41234,
        log_level="error",
        log_requests=True,
        served_model_name="another",
        api_key="secret",
        crash_dump_folder=str(tmp_path / "dumps"),
        random_seed=77,
        max_running_requests=7,
        max_total_tokens=8192,
        chunked_prefill_size=128,
        mem_fraction_static=0.25,
        schedule_policy="lpm",
        hicache_ratio=3.0,
        watchdog_timeout=400,
    )
    assert warm[0].stored == 192
    assert [each.tokens for each in warm] == [each.tokens for each in without]


def test_a_file_beside_the_weights_and_an_argument_that_counts_are_other_pages(model, daemon, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    assert ask(folder, daemon.url)[0].stored == 0
    assert ask(folder, daemon.url)[0].stored == 192
    assert ask(folder, daemon.url, json_model_override_args='{"rope_theta": 500000.0}')[0].stored == 0
    (folder / "generation_config.json").write_text("{}")
    assert ask(folder, daemon.url)[0].stored == 0
