"""``tierstore-engine generate --batch``: each request gets exactly one result, through any interruption."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.pictured import data_url, picture, write_folder
from tests.forked import Forked
from tierstore.errors import UsageError
from tierstore.testing.clock import wait_until
from tierstore_engine.batch_file import BatchLine, BatchResults, read_batch
from tierstore_engine.build import build_engine, load_model, open_model
from tierstore_engine.cli import main
from tierstore_engine.pool_sizes import check_resident, resident_sequences
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

Run = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a batch of these lines in an empty directory: exit code, results, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(lines: Sequence[object], *options: str) -> tuple[int, list[dict[str, Any]], str]:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
        Path("batch.jsonl").write_text("\n".join(texts))
        command = ["tierstore-engine", "generate", "--model", "tiny", "--batch", "batch.jsonl"]
        monkeypatch.setattr(sys, "argv", [*command, *options])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, list(map(json.loads, out.splitlines())), err

    return call


def texts(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in results}


def test_results_are_those_of_each_prompt_alone(run: Run) -> None:
    prompts = [f"{number} is a number. " * (number % 5 + 1) for number in range(12)]
    code, results, err = run(
        [{"prompt": prompt} for prompt in prompts], "--max-new-tokens", "9", "--max-sequences", "5"
    )
    assert code == 0
    assert "12 of 12 requests" in err
    engine = build_engine(load_model(open_model("tiny", device="cpu")), pool_pages=64)
    try:
        expected = [engine.generate([prompt], SamplingParams(max_new_tokens=9))[0].text for prompt in prompts]
    finally:
        engine.close()
    assert texts(results) == {f"line-{at}": text for at, text in enumerate(expected, 1)}


def test_openai_files(run: Run) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 3}
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body}
    text = {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": ["a", "b"], "n": 2, "seed": 1}}
    code, results, _ = run([chat, text], "--max-new-tokens", "4")
    assert code == 0
    found = {each["custom_id"]: each["response"] for each in results}
    assert found["chat"]["status_code"] == found["text"]["status_code"] == 200
    assert found["chat"]["body"]["usage"]["completion_tokens"] == 3
    assert found["chat"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert [each["index"] for each in found["text"]["body"]["choices"]] == [0, 1, 2, 3]
    assert found["text"]["body"]["usage"]["completion_tokens"] == 16


def test_chats_about_images(run: Run, tmp_path: Path) -> None:
    folder = write_folder("qwen", tmp_path / "model")
    url = data_url(picture(1))
    urls = {"one": url, "other": url, "bad": url[:-40]}
    lines = [
        {
            "custom_id": name,
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": each}}]}]
            },
        }
        for name, each in urls.items()
    ]
    code, results, _ = run(lines, "--model", str(folder), "--max-new-tokens", "4", "--ignore-eos")
    assert code == 1
    found = {each["custom_id"]: each for each in results}
    assert "an image is damaged" in found["bad"]["error"]["message"]
    one, other = (found[name]["response"]["body"]["choices"][0]["message"] for name in ("one", "other"))
    assert one == other


def test_bad_lines_fail_alone(run: Run) -> None:
    lines: dict[str, object] = {
        "not JSON": "nonsense",
        "not a JSON object": "[1]",
        "custom_id is not a text": {"custom_id": 7, "prompt": "x"},
        "method must be POST": {"method": "GET", "url": "/v1/completions", "body": {}},
        "url must be": {"url": "/v1/embeddings", "body": {}},
        "body is not": {"url": "/v1/completions", "body": []},
        "'other' is no field": {"other": 1, "url": "/v1/completions", "body": {}},
        "missing required field `prompt`": {"temperature": 1},
        "unknown field `depth`": {"prompt": "x", "depth": 1},
        "is not one of 'tiny'": {"prompt": "x", "model": "gpt-4"},
        "stream is not possible": {"prompt": "x", "stream": True},
        "ttft_slo_s is not possible": {"prompt": "x", "ttft_slo_s": 1},
        "hand-over is not possible": {"prompt": "x", "kv_transfer_params": {"do_remote_decode": True}},
        "prompt must be a list of token ids": {"prompt": [1, "x"]},
        "prompt is empty": {"prompt": []},
        "between 0 and": {"prompt": [10**6]},
        "has 9001 tokens": {"prompt": "x" * 9000},
        "needs at least one token": {"prompt": [[]]},
    }
    code, results, err = run([*lines.values(), {"prompt": "good", "custom_id": "good"}])
    assert code == 1
    assert f"{len(lines)} of {len(lines) + 1} requests failed" in err
    failed = {each["custom_id"]: each["error"]["message"] for each in results if each["error"]}
    said = [failed[f"line-{number}"] for number in range(1, len(lines) + 1)]
    for wanted, message in zip(lines, said, strict=True):
        assert wanted in message.replace("Object ", "")
    assert "good" in texts([each for each in results if not each["error"]])


def test_a_prompt_a_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("prompts.txt").write_text("\N{BYTE ORDER MARK}one\n\n  two \n", encoding="utf-8")
    assert [(each.id, each.body) for each in read_batch(Path("prompts.txt"))] == [
        ("line-1", {"prompt": "one"}),
        ("line-3", {"prompt": "two"}),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", "gone.jsonl"), "cannot read the batch gone.jsonl: No such file"),
        (("--batch", "binary"), "binary is not text in UTF-8"),
        (("--batch", "empty"), "empty has no request"),
        (("--batch", "twice"), "lines 1 and 3 of twice have the same id 'a'"),
        (("--prompt", "x"), "--batch, or a prompt, but not both"),
        (("--json",), "--json is for one prompt"),
        (("--output", "no/where"), "cannot write results to no/where: No such file"),
        (("--output", "/dev/null"), "/dev/null: it is no file"),
        (("--output", "binary"), "line 1 of binary is no result"),
        (("--output", "other"), "has the result of 'z', which the batch does not have"),
        (("--output", "changed"), "'line-1' has changed"),
        (("--max-sequences", "0"), "must be positive"),
        (("--temperature", "-1"), "temperature must be 0 or more"),
        (("--hbm-bytes", "1KiB"), "at least one page"),
    ],
)
def test_mistakes(options: tuple[str, ...], message: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("tierstore_engine.opening.load_model", load)
    Path("binary").write_bytes(b"\xff\xfe\n")
    Path("empty").write_text("\n \n")
    Path("twice").write_text('{"prompt": "x", "custom_id": "a"}\n\n{"prompt": "y", "custom_id": "a"}\n')
    Path("other").write_text('{"id": "batch_req_1", "custom_id": "z", "error": null}\n')
    Path("changed").write_text('{"id": "batch_req_1", "custom_id": "line-1", "error": null}\n')
    before = {file: file.read_bytes() for file in Path().iterdir()}
    code, results, err = run([{"prompt": "x"}], *options)
    assert (code, results) == (2, [])
    assert message in err
    assert err.count("\n") == 1
    after = {file: file.read_bytes() for file in Path().iterdir() if file.name != "batch.jsonl"}
    assert after == before


def test_options_that_need_a_batch(run: Run, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "generate", "--model", "tiny", "--prompt", "x", "--output", "y"])
    with pytest.raises(SystemExit):
        main()
    assert "need --batch" in capfd.readouterr().err


def test_a_full_disk_ends_the_run_with_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchResults before it stay, and the next run continues."""
    lines = [{"prompt": str(number)} for number in range(6)]
    write, calls = os.write, []

    def full(fd: int, data: Any) -> int:
        calls.append(fd)
        if len(calls) == 3:
            return write(fd, bytes(data)[:10])
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    options = ("--output", "out", "--max-sequences", "1", "--max-new-tokens", "3")
    with monkeypatch.context() as patch:
        patch.setattr("tierstore_engine.batch_file.os.write", full)
        code, _, err = run(lines, *options)
    assert code == 1
    assert "No space left" in err
    assert Path("out").read_text().count("\n") == 2
    code, _, err = run(lines, *options)
    assert code == 0
    assert "6 of 6 requests" in err
    assert "(2 before this run)" in err
    assert Path("out").read_text().count("\n") == 6


@pytest.mark.timeout(120)
def test_killed_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    count, out = 24, tmp_path / "out.jsonl"
    Path("batch.jsonl").write_text("".join(f'{{"prompt": "{n} {n}"}}\n' for n in range(count)))
    options = ["generate", "--model", "tiny", "--batch", "batch.jsonl", "--output", str(out)]
    options += ["--max-sequences", "2", "--max-new-tokens", "40"]
    before = b""

    def lines() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    for _ in range(3):
        had = lines()
        process = Forked("tierstore_engine.cli", options, cwd=tmp_path)
        wait_until(lambda had=had: lines() > had + 2)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert out.read_bytes().startswith(before)  # what was written stays
        before = out.read_bytes()[: out.read_bytes().rfind(b"\n") + 1]
        with out.open("ab") as torn:
            torn.write(b'{"id": "batch_req_')
    assert 0 < lines() < count
    process = Forked("tierstore_engine.cli", options, cwd=tmp_path)
    assert process.wait(60) == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(each["custom_id"] for each in results) == sorted(f"line-{n + 1}" for n in range(count))
    assert out.read_bytes().startswith(before)


ENTRIES = [BatchLine(f"é{number}", f"batch_req_{number}") for number in range(5)]


@given(cut=st.integers(0, 1000), failed=st.sets(st.integers(0, 4)))
def test_a_file_cut_anywhere_has_its_whole_lines(cut: int, failed: set[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out"
        results = BatchResults(file, ENTRIES, io.StringIO())
        errors = [{"message": "it\nfailed"} if at in failed else None for at in range(5)]
        results.add(
            {"id": entry.digest, "custom_id": entry.id, "error": error}
            for entry, error in zip(ENTRIES, errors, strict=True)
        )
        with pytest.raises(UsageError, match="another process writes"):
            BatchResults(file, ENTRIES, io.StringIO())
        results.close()
        whole = file.read_bytes()[:cut].count(b"\n")
        with file.open("r+b") as cutting:
            cutting.truncate(min(cut, file.stat().st_size))
        again = BatchResults(file, ENTRIES, io.StringIO())
        again.close()
        assert again.done == {entry.id for entry in ENTRIES[:whole]}
        assert again.failed == sum(at in failed for at in range(whole))
        assert file.read_bytes().count(b"\n") == whole
        assert not whole or file.read_bytes().endswith(b"\n")


def test_neighbours_share_their_beginnings(run: Run) -> None:
    """In the file's order each document would have left the pool when its next question comes."""
    documents = [f"{letter} document. " * 60 for letter in "ABCDEF"]
    lines = [{"prompt": document + f"question {n}?"} for n in range(3) for document in documents]
    code, _, err = run(lines, "--hbm-bytes", "1MiB", "--max-sequences", "1", "--max-new-tokens", "2")
    assert code == 0
    reused = int(err.split(" reused")[0].split()[-1])
    whole = len(documents[0]) // 64 * 64
    assert reused >= 2 * len(documents) * whole


def test_a_batch_beyond_memory(run: Run) -> None:
    lines = [{"prompt": f"{number} " * 300} for number in range(6)]
    options = ("--max-new-tokens", "6", "--prefill-chunk", "64")
    _, expected, _ = run(lines, *options)
    code, found, _ = run(
        lines, *options, "--hbm-bytes", "512KiB", "--overflow", "over", "--overflow-bytes", "8MiB"
    )
    assert code == 0
    assert texts(found) == texts(expected)


@pytest.mark.parametrize("pages", [3, 18, 40, 1000])
def test_as_many_sequences_as_memory_allows(pages: int) -> None:
    spec = open_model("tiny", device="cpu").config.kv_spec(chunk_tokens=64)
    most = resident_sequences(spec, pages, EngineSettings(prefill_chunk=128))
    for sequences in (most, most + 1):
        if sequences > 0:
            settings = EngineSettings(prefill_chunk=128, max_sequences=sequences)
            if sequences == most:
                check_resident(spec, pages, settings)
            else:
                with pytest.raises(UsageError, match="max_sequences"):
                    check_resident(spec, pages, settings)
