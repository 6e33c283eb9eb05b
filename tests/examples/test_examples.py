"""The programs in ``examples/``, run as a reader would run them. (Those for vLLM and llama.cpp:
``tests/vllm`` and ``tests/llamacpp``.)"""

from __future__ import annotations

import json
from pathlib import Path

from tests import forked

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments, cwd):
    """The lines that an example prints."""
    code, out, err = forked.run(str(EXAMPLES / name), *arguments, cwd=cwd)
    assert (code, err) == (0, "")
    return out.splitlines()


def test_every_example_is_run_and_listed():
    index = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"[{path.name}]({path.name})" in index
    here = Path(__file__).parents[1]
    others = [here / engine / "test_example.py" for engine in ("vllm", "llamacpp")]
    tests = "".join(path.read_text() for path in (Path(__file__), *others))
    assert all(f'"{path.name}"' in tests for path in EXAMPLES.glob("*.py"))


def test_embedded_store(tmp_path):
    assert run("embedded_store.py", "kv", cwd=tmp_path) == [
        "1003 tokens: 0 reused {}",
        "1003 tokens: 1000 reused {'host': 1000}",
    ]
    first, second = run("embedded_store.py", "kv", cwd=tmp_path)
    assert first == "1003 tokens: 1003 reused {'disk': 1003}"
    assert second.startswith("1003 tokens: 1003 reused {'host': ")


def test_daemon_and_engine(tmp_path):
    first, second, verdict = run("daemon_and_engine.py", cwd=tmp_path)
    assert first.endswith("reused {}")
    tokens = int(first.split()[1])
    assert second.endswith(f"reused {{'host': {tokens - 1}}}")
    assert verdict == "the same answer"


def test_own_engine(tmp_path):
    *lines, verdict = run("own_engine.py", "kv", cwd=tmp_path)
    computed = [int(line.split("computed ")[1].split()[0]) for line in lines]
    assert computed[0] > 400
    assert all(each < 40 for each in computed[1:])
    assert verdict == "the same answers"
    assert (tmp_path / "kv").is_dir()


def test_transformers_generate(tmp_path):
    from tests.tiny_models import reference_model, train_tokenizer

    folder = tmp_path / "model"
    reference_model("llama3").save_pretrained(folder)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (first, second), (third, fourth) = (
        run("transformers_generate.py", folder, "kv", cwd=tmp_path) for _ in range(2)
    )
    tokens = [int(line.split()[1]) for line in (first, second)]
    loaded = [int(line.split("loaded ")[1].split(":")[0]) for line in (first, second, third, fourth)]
    assert loaded[0] == 0
    assert loaded[1] > tokens[1] - 90
    assert loaded[2] >= tokens[0] // 64 * 64
    assert [line.split(": ", 1)[1] for line in (third, fourth)] == [
        line.split(": ", 1)[1] for line in (first, second)
    ]
