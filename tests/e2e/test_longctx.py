"""The benchmark itself, small: it is the project's end-to-end test."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests import forked
from tests.portions import SOAK, chosen
from tierstore.errors import TierStoreError
from tierstore.memory import Memory
from tierstore_engine.build import open_model
from tierstore_engine.outputs import RequestMetrics
from tierstore_tools.cli import main
from tierstore_tools.longctx import beyond, cases, command
from tierstore_tools.longctx.session import LongContextAnswer, logit_bound, logit_difference, same_bits
from tierstore_tools.longctx.settings import LongContext

CASES = ["store_off", "cold", "hbm", "host", "disk", "tail"]


def bench(*arguments, cwd):
    code, _, err = forked.run("tierstore_tools.cli", "longctx", *arguments, cwd=cwd)
    assert code == 0, err


def test_every_hit_equals_the_cold_run(tmp_path):
    bench(
        *("--model", "tiny", "--tokens", "600", "--prefill-chunk", "256", "--sweep", "300"),
        *("--json", "out.json", "--plot", "out.png"),
        cwd=tmp_path,
    )
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["case"] for row in document["rows"]] == CASES
    rows = {row["case"]: row for row in document["rows"]}
    assert all(row["identical"] for row in rows.values())
    assert rows["store_off"]["max_logit_diff"] == 0
    assert [rows[case]["reused_tokens"] for case in CASES] == [0, 0, 599, 599, 599, 631]
    assert rows["disk"]["pages_identical"]
    assert rows["disk"]["moved_bytes"] == rows["host"]["moved_bytes"] > 0
    assert document["sweep"][0]["prompt_tokens"] == 300
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


def test_a_prompt_that_ends_with_a_page(tmp_path):
    """Its last token, and so its last page, every run computes for itself. Two processes compute it."""
    bench(
        *("--model", "tiny", "--tokens", "256", "--parts", "2", "--store", "new", "--json", "out.json"),
        cwd=tmp_path,
    )
    assert list((tmp_path / "new").iterdir()) == []  # it was made, and nothing is left in it
    document = json.loads((tmp_path / "out.json").read_text())
    one, other = (part["held_bytes"] for part in document["parts"])
    assert min(one, other) > 0.4 * (one + other)
    assert all(part["sent_bytes_per_token"] for part in document["parts"])
    rows = {row["case"]: row for row in document["rows"]}
    assert all(row["identical"] for row in rows.values())
    assert all(row["slowest_ttft_s"] >= row["ttft_s"] for row in rows.values())


def test_contexts_beyond_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(beyond, "_RAW_BYTES", 1 << 22)
    beyond.run(
        *("tiny", [1, 3]),
        tokens=256,
        directory=tmp_path,
        dtype=None,
        chunk_tokens=16,
        json=str(tmp_path / "out.json"),
    )
    once, more = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["tokens"] for row in (once, more)] == [256, 768]
    assert once["of_disk"] == 0  # all pages fit the memory
    assert more["of_disk"] > 0
    assert all(row["max_logit_diff"] == 0 and row["of_here"] > 0 for row in (once, more))
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@SOAK  # the shallow models take a fifth of the time
@pytest.mark.timeout(900)
def test_a_deep_model_in_16_bits_is_held_to_what_rounding_explains(tmp_path):
    bench(*("--model", "deep", "--tokens", "150", "--json", "out.json"), cwd=tmp_path)
    rows = {row["case"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert all(row["identical"] for row in rows.values())
    assert all(row["max_logit_diff"] <= row["logit_bound"] for row in rows.values())
    for case in ("hbm", "host", "disk"):
        assert rows[case]["hits_identical"]
        assert rows[case]["pages_identical"]


@pytest.mark.parametrize("chunk_tokens", chosen([64, 256], 256))
@pytest.mark.parametrize("kv_dtype", chosen(["auto", "fp8_e4m3", "k8v4"], "k8v4"))
def test_a_hit_that_ends_where_a_prefill_chunk_ended_gives_the_very_same_logits(
    tmp_path, kv_dtype, chunk_tokens
):
    """1025 tokens: 1024 are reused, which is where the cold run's last chunk began."""
    sizes = {"kv_dtype": kv_dtype, "chunk_tokens": chunk_tokens}
    settings = LongContext("tiny", 1025, tmp_path, device="cpu", prefill_chunk=512, **sizes)
    command.run(settings, json=str(tmp_path / "out.json"), plot=None)
    rows = {row["case"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    for case in ("hbm", "host", "disk"):
        assert rows[case]["reused_tokens"] == 1024
        assert rows[case]["pages_identical"]
        assert rows[case]["max_logit_diff"] == 0
    spec = open_model("tiny", kv_dtype=kv_dtype).config.kv_spec(chunk_tokens=chunk_tokens)
    assert rows["disk"]["moved_bytes"] == 1024 // chunk_tokens * spec.page_bytes


def flip_a_bit(pool, page):
    scratch = Memory(pool.spec.page_bytes, shared=False)
    pool.read_pages([(page, scratch.address)])
    scratch.view(0, pool.spec.page_bytes)[100] ^= 1
    pool.write_pages([(page, scratch.address)])


@pytest.mark.parametrize("dtype", chosen(["float32", "bfloat16"], "bfloat16"))
def test_one_flipped_bit_in_a_page_is_found(monkeypatch, tmp_path, dtype):
    """In the HBM page that the cold run left, after its digest was taken: the lowest bit of one number."""
    digests = cases.page_digests
    flipped = []

    def then_flip(engine, prompt):
        taken = digests(engine, prompt)
        if not flipped:
            connector = engine.connector
            loaded = connector.load(connector.lookup(connector.prompt(prompt))).wait()
            flipped.append(loaded.pages[3])
            flip_a_bit(connector.pool, loaded.pages[3])
            connector.release(loaded.pages)
        return taken

    monkeypatch.setattr(cases, "page_digests", then_flip)
    settings = LongContext("tiny", 300, tmp_path, device="cpu", dtype=dtype)
    with pytest.raises(TierStoreError, match="differ from the cold run: hbm"):
        command.run(settings, json=str(tmp_path / "out.json"), plot=None)
    assert flipped
    row = json.loads((tmp_path / "out.json").read_text())["rows"][2]
    assert (row["case"], row["pages_identical"], row["identical"]) == ("hbm", False, False)


def answer(tokens, logits):
    return LongContextAnswer(tuple(tokens), np.array(logits, np.float32), 1.0, 1.0, RequestMetrics())


def test_logits_are_compared_up_to_the_first_token_that_differs():
    cold = answer([1, 0, 1], [[0.0, 1.0], [1.0, 0.9], [0.0, 9.0]])
    hit = answer([1, 1, 0], [[0.0, 1.0], [0.9, 1.0], [9.0, 0.0]])
    assert logit_difference(hit, cold) == pytest.approx(0.1)
    assert logit_difference(cold, cold) == 0
    assert not same_bits(hit, cold)


def test_what_rounding_may_do_grows_with_the_depth_and_the_coarseness_of_the_numbers():
    cold = answer([0], [[-3.0, 3.0]])
    by_dtype = [logit_bound(cold, layers=24, dtype=dtype) for dtype in ("float32", "float16", "bfloat16")]
    assert by_dtype == sorted(by_dtype)
    assert logit_bound(cold, layers=4, dtype="float32") == 2 * logit_bound(cold, layers=1, dtype="float32")
    assert by_dtype[-1] < 3.0  # what a wrong page does


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "huge"], "presets"),
        (["--model", "tiny", "--tokens", "100000"], "allows 8192"),
        (["--tokens", "5"], "too few"),
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (["--store", "missing/kv"], "cannot make missing/kv"),
        (["--sweep", "a,b"], "--sweep"),
        (["--json", "missing/out.json", "--model", "tiny"], "no such directory"),
        (["--device", "tpu"], "unknown device"),
    ],
)
def test_bad_usage_is_one_clear_line_and_leaves_nothing_behind(monkeypatch, capfd, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tierstore-bench", "longctx", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr().err
    [line] = [line for line in said.splitlines() if line.startswith("tierstore-bench:")]
    assert says in line
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
