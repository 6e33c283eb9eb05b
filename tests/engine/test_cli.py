"""``tierstore-engine``: text on stdout, one line on stderr, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tierstore
from tests.forked import Forked
from tierstore_engine.cli import main

PROMPT = "Once upon a time there was a very small model. " * 4


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tierstore-engine", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return call


Run = Callable[..., tuple[int, str, str]]


def test_generate(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    code, out, err = run(
        "generate", "--model", "tiny", "--prompt-file", "prompt.txt", "--max-new-tokens", "20"
    )
    assert code == 0
    assert out.strip()
    assert err.count("\n") == 1
    assert f"prompt {len(PROMPT) + 1} tokens: 0 from hbm, 0 from host, 0 from disk; TTFT" in err
    assert "tokens/s" in err


def test_the_same_seed_gives_the_same_text(run: Run) -> None:
    options = ("--model", "tiny", "--prompt", "hi", "--temperature", "1.2", "--top-p", "0.9", "--seed", "3")
    first, second = (run("generate", *options, "--max-new-tokens", "30")[1] for _ in range(2))
    assert first == second
    assert first != run("generate", *options[:-1], "4", "--max-new-tokens", "30")[1]


def test_drafts_and_the_same_bits(run: Run, tmp_path: Path) -> None:
    options = ("--model", "tiny", "--prompt", PROMPT[:200] * 2, "--json", "--max-new-tokens", "30")
    cold = json.loads(run("generate", *options, "--deterministic")[1])
    for draft in ("prompt-lookup", "tiny"):
        code, out, err = run("generate", *options, "--deterministic", "--draft", draft, "--store", "store")
        assert code == 0, err
        found = json.loads(out)
        assert found["tokens"] == cold["tokens"]
        assert found["drafted_tokens"] >= found["accepted_tokens"] >= (20 if draft == "tiny" else 0)
        assert bool(found["reused_tokens"]) == (draft == "tiny")


def test_json(run: Run) -> None:
    code, out, _ = run("generate", "--model", "tiny", "--prompt", "hi", "--json", "--max-new-tokens", "5")
    report = json.loads(out)
    assert code == 0
    assert report["prompt_tokens"] == 3
    assert report["generated_tokens"] == len(report["tokens"])
    assert {"text", "ttft_s", "reused_tokens_by_tier", "tokens_per_s", "finish_reason"} <= report.keys()


def test_a_checkpoint_folder(run: Run, checkpoints: Callable[..., Path]) -> None:
    code, out, err = run("generate", "--model", str(checkpoints("llama3")), "--prompt", "the cat sat")
    assert code == 0, err
    assert out.strip()


@pytest.mark.parametrize("chunk", [16, 256])
def test_pages_of_another_size_are_other_pages(run: Run, tmp_path: Path, chunk: int) -> None:
    options = (
        "--model",
        "tiny",
        "--prompt",
        "x" * 600,
        "--max-new-tokens",
        "4",
        "--store",
        "store",
        "--json",
    )
    sized = (*options, "--chunk-tokens", str(chunk))
    first, again = (json.loads(run("generate", *each)[1]) for each in (sized, sized))
    other = json.loads(run("generate", *options)[1])
    assert first["tokens"] == again["tokens"] == other["tokens"]
    assert again["reused_tokens_by_tier"]["disk"] == 600
    assert not other["reused_tokens_by_tier"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "huge", "--prompt", "x"), 2, "neither a folder nor a preset"),
        (("--model", ".", "--prompt", "x"), 1, "is not a model folder"),
        (("--model", "tiny"), 2, "no prompt: give --prompt-file"),
        (("--model", "tiny", "--prompt-file", "gone.txt"), 2, "cannot read the prompt from gone.txt"),
        (("--model", "tiny", "--prompt", "x" * 8192), 2, "has 8193 tokens, but the model allows 8192"),
        (
            ("--model", "tiny", "--prompt", "x", "--temperature", "-1"),
            2,
            "temperature must be 0 or more and finite, got -1.0",
        ),
        (("--model", "tiny", "--prompt", "x", "--hbm-bytes", "1KiB"), 2, "at least one page of 32 KiB"),
        (("--model", "tiny", "--prompt", "x", "--hbm-bytes", "lots"), 2, "not a size: 'lots'"),
        (("--model", "tiny", "--prompt", "x" * 500, "--hbm-bytes", "64KiB"), 2, "need 10 pages (320 KiB)"),
        (("--model", "tiny", "--prompt", "x", "--prefill-chunk", "100"), 2, "multiple of the page's 64"),
        (("--model", "tiny", "--prompt", "x", "--chunk-tokens", "0"), 2, "chunk_tokens must be"),
        (("--model", "tiny", "--prompt", "x", "--chunk-tokens", "48"), 2, "multiple of the page's 48"),
        (("--model", "tiny", "--prompt", "x", "--device", "cuda"), 2, "no CUDA device"),
        (("--model", "tiny", "--prompt", "x", "--device", "cuda:1"), 2, "no CUDA device"),
        (("--model", "tiny", "--prompt", "x", "--device", "cuda:"), 2, "unknown device"),
        (("--model", "tiny", "--prompt", "x", "--dtype", "int4"), 2, "unknown dtype 'int4'"),
        (("--model", "tiny", "--prompt", "x", "--kv-dtype", "int3"), 2, "unknown KV dtype 'int3'"),
        (("--model", "tiny", "--prompt", "x", "--draft", "huge"), 2, "neither a folder nor a preset"),
        (("--model", "tiny", "--prompt", "x", "--draft-tokens", "3"), 2, "--draft-tokens needs --draft"),
        (("--model", "tiny", "--prompt", "x", "--overflow-bytes", "1GiB"), 2, "needs --overflow"),
        (
            ("--model", "tiny", "--prompt", "x", "--draft", "mtp"),
            2,
            "--draft mtp is for DeepSeek V3 and Qwen3-Next",
        ),
        (
            ("--model", "tiny-deepseek", "--prompt", "x", "--draft", "mtp", "--overflow", "over"),
            2,
            "--draft mtp needs all pages in the pool: leave out --overflow",
        ),
        (
            ("--model", "tiny", "--prompt", "x", "--deterministic", "--dtype", "float16"),
            2,
            "computes in float32 or bfloat16, not float16",
        ),
        (
            ("--model", "tiny", "--prompt", "x", "--hbm-bytes", "99TiB"),
            2,
            "does not fit this machine's memory",
        ),
    ],
)
def test_mistakes(arguments: tuple[str, ...], code: int, message: str, run: Run, tmp_path: Path) -> None:
    found, out, err = run("generate", *arguments, "--store", "store")
    assert found == code
    assert message in err
    assert err.startswith("tierstore-engine: ")
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_finds_the_first_ones_pages(run: Run) -> None:
    options = ("--model", "tiny", "--prompt", PROMPT, "--store", "store", "--json", "--max-new-tokens", "9")
    first, second = (json.loads(run("generate", *options)[1]) for _ in range(2))
    assert first["reused_tokens_by_tier"] == {}
    assert second["reused_tokens_by_tier"] == {"disk": len(PROMPT)}
    assert second["tokens"] == first["tokens"]


def test_pages_of_another_kv_dtype_are_another_models(run: Run) -> None:
    options = ("--model", "tiny", "--prompt", PROMPT, "--store", "store", "--json", "--max-new-tokens", "9")
    for kv_dtype in ("auto", "fp8_e4m3", "int8", "k8v4"):
        for reused in ({}, {"disk": len(PROMPT)}):
            code, out, _ = run("generate", *options, "--kv-dtype", kv_dtype)
            assert code == 0
            assert json.loads(out)["reused_tokens_by_tier"] == reused


@pytest.mark.parametrize("model", ["tiny", "tiny-gemma3"])
def test_pages_come_back_from_a_disk_that_encodes_them(run: Run, tmp_path: Path, model: str) -> None:
    options = (
        "--model",
        model,
        "--prompt",
        "x" * 1500,
        "--store",
        "store",
        "--json",
        "--max-new-tokens",
        "9",
    )
    sized = (*options, "--chunk-tokens", "256", "--dtype", "bfloat16")  # smaller pages are kept as they are
    encoded = (*sized, "--disk-codec", "lossless")
    first, second = (json.loads(run("generate", *encoded)[1]) for _ in range(2))
    assert (first["reused_tokens_by_tier"], second["tokens"]) == ({}, first["tokens"])
    assert second["reused_tokens_by_tier"]["disk"] >= 1024
    spec = tierstore.KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, dtype="float32")
    with tierstore.open(tmp_path / "store", spec) as store:
        assert any(record.codec for _, record in store.backend.core.disk.scan())


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--store", "file.txt"), 1, "file.txt"),
        (("--store", "/proc/store"), 1, "/proc/store"),
        (("--store", "store", "--host-bytes", "1KiB"), 2, "host_bytes"),
        (("--store", "store", "--disk-bytes", "1KiB"), 2, "disk_bytes"),
        (("--store", "redis://host"), 2, "redis://host"),
        (("--store", "ipc:///none", "--disk-codec", "lossless"), 2, "tierstore serve --disk-codec"),
        (("--store", "store", "--disk-codec", "gzip"), 2, "gzip"),
    ],
)
def test_stores_that_cannot_be_opened(
    options: tuple[str, ...], code: int, message: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file.txt").write_text("not a directory")
    found, out, err = run("generate", "--model", "tiny", "--prompt", "x", *options)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_a_reader_that_leaves_early() -> None:
    options = ["generate", "--model", "tiny", "--prompt", "hi", "--max-new-tokens", "2000", "--ignore-eos"]
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    process = Forked("tierstore_engine.cli", options, (0, its_out, its_err))
    os.close(its_out)
    os.close(its_err)
    os.read(out, 1)
    os.close(out)
    with open(err) as said:
        assert said.read() == ""
    assert process.wait(30) == 1


def test_help_does_not_import_torch() -> None:
    command = "import sys; import tierstore_engine.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], check=True)
