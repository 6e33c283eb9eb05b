"""``tierstore-bench scenarios``: tiny loads against real servers, the loads themselves, and refusals."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import forked
from tierstore.errors import TierStoreError, UsageError
from tierstore_tools.cli import main
from tierstore_tools.scenarios import load, targets
from tierstore_tools.scenarios.endpoint import NonsenseError, Reply, ScenarioRequest, connected
from tierstore_tools.scenarios.runs import Agreement, Slo
from tierstore_tools.scenarios.targets import KNOWN, ServerRoom, Workshop, reserved_tokens

TRACE = Path(__file__).parents[1] / "data" / "mooncake" / "conversation_2000.jsonl.gz"


@pytest.fixture
def bench_here(monkeypatch, capfd):
    """Run the command in this process. Its servers are forks of a process that has imported torch."""

    def launch(command, log, threads):
        module = "tierstore_engine.cli" if command[1] == "-c" else command[2]
        return forked.Forked(module, command[3:], (0, log.fileno(), log.fileno()))

    def run(*arguments):
        monkeypatch.setattr(targets, "launch", launch)
        monkeypatch.setattr("sys.argv", ["tierstore-bench", "scenarios", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    return run


def test_all_scenarios_against_real_servers(tmp_path, bench_here):
    """The engine over a daemon, and the loop with static batches."""
    sizes = "--tokens 256 --pool-tokens 1024 --requests 6 --answer 4 --rate 8 --seconds 1 --rounds 1"
    code, out, err = bench_here(
        *("all", "--targets", "ours+store,vllm,transformers", "--model", "tiny-text", *sizes.split()),
        *("--slow-readers", 3, "--trace", TRACE, "--block-tokens", 16, "--request-s", 60),
        *("--host-bytes", "64MiB", "--disk-bytes", "256MiB"),
        *("--json", tmp_path / "out.json", "--plot", tmp_path / "out.png"),
    )
    assert code == 0, err
    document = json.loads((tmp_path / "out.json").read_text())
    for name in ("batch", "longctx", "online", "stream"):
        assert {row["target"] for row in document[name]} == {"ours+store", "transformers"}
        assert name in out
    assert [each["name"] for each in document["left_out"]] == ["vllm"]
    assert "left out: vllm: --vllm-python names no environment" in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert {row["same_answers"] for row in document["batch"] + document["longctx"]} == {1.0}
    # Static batches wait for the slow readers among them, on a busy machine beyond any limit.
    ours = [row for row in document["stream"] if row["target"] == "ours+store"]
    assert {row["failed"] for row in document["batch"] + document["online"] + ours} == {0}
    assert all(row["peak_memory_bytes"] > 50 << 20 for row in document["batch"])
    _check_tiers(document["longctx"])
    _check_arrivals(document["online"])
    cases = [(row["beside"], row["target"]) for row in document["stream"]]
    besides = ("alone", "3 slow readers", "3 long prompts")
    assert cases == [(beside, target) for beside in besides for target in ("ours+store", "transformers")]
    assert all(0 <= row["itl_p50_s"] <= row["itl_p99_s"] <= row["itl_max_s"] for row in document["stream"])


def _check_tiers(rows):
    found = {(row["target"], row["case"]): row["found"] for row in rows}
    # What takes longer to load than to compute is computed, as little as it is here.
    assert found.pop(("ours+store", "server restarted")) in ("host", "nowhere")
    assert found.pop(("ours+store", "both restarted")) in ("disk", "nowhere")
    assert found == {
        ("ours+store", "cold"): "nowhere",
        ("ours+store", "again"): "hbm",
        ("transformers", "cold"): "nowhere",
        ("transformers", "again"): "nowhere",
    }


def _check_arrivals(rows):
    held = {(row["target"], row["arrivals"]): row["hit_rate"] for row in rows}
    assert set(held) == {(t, a) for t in ("ours+store", "transformers") for a in ("poisson", "trace")}
    assert held["transformers", "poisson"] == 0 < held["ours+store", "poisson"]
    for row in rows:
        assert row["ttft_p50_s"] <= row["ttft_p99_s"]
        assert 0 <= round(row["goodput_per_s"] * row["seconds_s"], 6) <= row["requests"]
        assert row["arrivals"] == "poisson" or row["requests"] == 8


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["race"], 2, "unknown scenario 'race'"),
        (["batch", "--targets", "theirs"], 2, "unknown target 'theirs'"),
        (["batch", "--url", "localhost:8000"], 2, "the address of a server is"),
        (["batch", "--url", "http://127.0.0.1:9"], 1, "nothing answers at http://127.0.0.1:9"),
        (["batch", "--targets", "vllm"], 1, "--vllm-python names no environment"),
        (["batch", "--targets", "vllm", "--vllm-python", "/nowhere/python"], 2, "cannot be run"),
        (["batch", "--targets", "ours", "--model", "/nowhere"], 2, "neither a Hugging Face folder"),
        (["online", "--rate", "1000", "--seconds", "60"], 2, "at most 10,000 requests"),
        (["online", "--trace", "/nowhere/trace"], 2, "there is no trace"),
        (
            ["batch", "--tokens", "4096", "--pool-tokens", "1024"],
            2,
            "--pool-tokens must be at least --tokens",
        ),
        (["batch", "--tokens", "256"], 2, "--tokens must be at least 16 answers"),
        (["batch", "--plot", "/nowhere/a.png"], 2, "no such directory"),
    ],
)
def test_what_cannot_be_run_is_a_line(bench_here, arguments, code, said):
    ended, out, err = bench_here(*arguments)
    assert (ended, out) == (code, "")
    assert said in " ".join(err.split())


class Nonsense(BaseHTTPRequestHandler):
    """``models`` is what /v1/models answers, ``stream`` what completions do."""

    models = '{"data": [{"id": "m"}]}'
    stream = ""

    def do_GET(self):
        self.answer(self.models)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(self.stream)

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def nonsense():
    """A server that is none of models. Yields its handler, whose answers can be set, and its address."""
    handler = type("Handler", (Nonsense,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def complete(url):
    async with connected(url, request_s=20) as endpoint:
        return await endpoint.ask(ScenarioRequest((1, 2, 3), 4))


def test_a_proxy_of_the_environment_is_not_asked_for_loopback(nonsense, monkeypatch):
    handler, url = nonsense
    handler.models = '{"data": [{"id": "m"}]}'
    handler.stream = 'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert asyncio.run(complete(url)).error is None


@pytest.mark.parametrize("models", ["<html>welcome</html>", "[]", "{}", '{"data": []}', '{"data": ["m"]}'])
def test_an_endpoint_that_lists_no_model_is_refused(nonsense, models):
    handler, url = nonsense
    handler.models = models
    with pytest.raises(NonsenseError):
        asyncio.run(complete(url))


PIECE = 'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        ("", "without [DONE]"),
        ("data: [DONE]\n\n", "no text"),
        ("data: hello\n\n", "not JSON"),
        ("data: 7\n\n", "not a JSON object"),
        ('data: {"object": "cat"}\n\n', "not a chunk of a completion"),
        ('data: {"error": {"message": "out of cats"}}\n\n', "out of cats"),
        (PIECE, "without [DONE]"),
    ],
)
def test_an_answer_that_is_none_is_an_error_of_its_request(nonsense, stream, error):
    handler, url = nonsense
    handler.stream = stream
    assert error in asyncio.run(complete(url)).error


def test_a_server_that_says_nothing_but_text_is_measured(nonsense):
    handler, url = nonsense
    handler.stream = f"{PIECE}{PIECE}data: [DONE]\n\n"
    reply = asyncio.run(complete(url))
    assert (reply.error, reply.text, reply.generated_tokens, reply.prompt_tokens) == (None, "aa", 2, 3)
    assert (reply.cached_tokens, len(reply.gaps_s)) == (0, 1)
    assert 0 < reply.ttft_s <= reply.last_at - reply.sent_at


def test_nonsense_ends_the_run_in_a_line(nonsense, bench_here):
    handler, url = nonsense
    handler.stream = "data: hello\n\n"
    code, _, err = bench_here("batch", "--url", url)
    assert code == 1
    assert f"{url} does not complete a prompt" in err.splitlines()[-1]


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 9))
def test_documents_are_shared_and_questions_are_not(requests, documents, seed):
    asks = load.documents(
        requests,
        documents=documents,
        document_tokens=20,
        question_tokens=5,
        answer_tokens=8,
        seed=seed,
    )
    assert len({ask.tokens for ask in asks}) == len(asks) == requests
    assert len({ask.tokens[:20] for ask in asks}) == min(documents, requests)
    assert {ask.max_tokens for ask in asks} <= {4, 8}


@given(st.floats(0.5, 20), st.integers(1, 6), st.integers(0, 9))
def test_a_turn_is_the_conversation_so_far_and_something_new(rate, sessions, seed):
    arrivals = load.conversations(
        rate,
        10,
        sessions=sessions,
        system_tokens=30,
        turn_tokens=10,
        answer_tokens=4,
        max_tokens=100,
        seed=seed,
    )
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert 0 == times[0] <= times[-1] < 10
    assert len({arrival.ask.tokens[:30] for arrival in arrivals}) == 1
    assert all(34 < len(arrival.ask.tokens) + 4 <= 100 for arrival in arrivals)
    known = [arrivals[0].ask.tokens[:30]]
    for arrival in arrivals:
        assert any(arrival.ask.tokens[: len(before)] == before for before in known)
        known.append(arrival.ask.tokens)


def test_a_trace_comes_at_its_own_pace_and_shares_what_it_shared():
    arrivals = load.from_trace(TRACE, 50, 5.0, block_tokens=16, answer_tokens=8, max_tokens=200, seed=0)
    assert arrivals[0].at_s == 0
    assert arrivals[-1].at_s == pytest.approx(10)
    assert all(len(arrival.ask.tokens) <= 192 for arrival in arrivals)
    first = Counter(arrival.ask.tokens[:16] for arrival in arrivals)
    assert first.most_common(1)[0][1] > 1, "the trace's requests share their first block"


def test_lengths_alone_are_no_trace_to_ask(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.0,4808,10\n")
    with pytest.raises(UsageError, match="no block ids"):
        load.from_trace(file, 1, 1.0, block_tokens=16, answer_tokens=8, max_tokens=200, seed=0)


def reply(text="a", *, ttft=0.1, last=0.5, generated=5, error=None, ask=ScenarioRequest((1,), 5)):
    return Reply(ask, 0.0, ttft, last, (), text, 1, generated, 0, {}, error)


def test_an_slo_is_of_the_first_token_and_the_mean_of_the_others():
    slo = Slo(0.1, 0.1)
    assert slo.met(reply())
    assert not slo.met(reply(ttft=0.11))
    assert not slo.met(reply(last=0.6))
    assert not slo.met(reply(error="gone"))


def test_agreement_is_with_the_first_answer():
    agreement = Agreement()
    assert agreement.share([reply("a"), reply("b", ask=ScenarioRequest((2,), 5))]) == 1
    assert agreement.share([reply("a"), reply("c", ask=ScenarioRequest((2,), 5))]) == 0.5
    assert agreement.share([reply("c", error="cut off")]) == 0


def test_reserved_kv_is_read_from_what_servers_say():
    assert reserved_tokens("static_batches_kv_slots 512\n") == 512
    ours = "# HELP x\ntierstore_engine_pages 10.0\ntierstore_engine_available_pages 7.0\n"
    assert reserved_tokens(ours) == 3 * 64
    vllm = (
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:cache_config_info{block_size="64",kv_cache_size_tokens="16384"} 1.0\n'
    )
    assert reserved_tokens(vllm) == 4096
    assert reserved_tokens("") is None


def test_every_known_target_is_had_or_says_why_not():
    assert [name for name in KNOWN if Workshop.why_not(name, None) is None] == [
        "ours",
        "ours+store",
        "transformers",
    ]
    assert "lacks vllm" in Workshop.why_not("vllm", Path(sys.executable))


def test_a_static_batch_has_as_many_rows_as_fit():
    assert ServerRoom(16384, 4096, 1, 0, 0).rows == 4
    with pytest.raises(TierStoreError):
        ServerRoom(100, 200, 1, 0, 0)
