from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tools.replay.written import mooncake_line, session, subagent, turn, write_lines
from tierstore.errors import UsageError
from tierstore_tools.replay.formats import LengthsTrace, load
from tierstore_tools.replay.trace import RawRequest, Trace, extent

# -- the packed form -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.lists(st.integers(0, 3), max_size=6), st.sampled_from("ab")),
        max_size=12,
    ),
)
def test_a_packed_trace_has_the_prompts_it_was_given(raw):
    raw = sorted(raw, key=lambda each: each[2])  # a scope that another one followed does not come back
    trace = Trace(16)
    for at_s, ids, scope in raw:
        trace.append(RawRequest(at_s, ids, 16 * len(ids), 1, session=scope, scope=scope))
    trace.close()
    expected = sorted(raw, key=lambda each: each[0])
    prefixes: dict[tuple[object, ...], int] = {}
    for request, (at_s, ids, scope) in zip(trace, expected, strict=True):
        assert (request.timestamp_s, request.session) == (at_s, scope)
        # Equal blocks are equal prefixes, and the other way round.
        named = [(scope, *ids[: end + 1]) for end in range(len(ids))]
        assert list(request.blocks) == [
            prefixes.setdefault(prefix, block) for prefix, block in zip(named, request.blocks, strict=True)
        ]
    assert len(set(prefixes.values())) == len(prefixes)
    assert extent(trace).unique_blocks == len(prefixes)


def test_prompts_of_ten_thousand_blocks_are_read_back():
    trace = Trace(64)
    for turns in range(20):
        trace.append(RawRequest(turns, range(10_000 + 50 * turns), 64 * 10_000, 1))
    trace.append(RawRequest(20.0, [*range(5_000), 77_777], 64 * 5_001, 1))
    trace.append(RawRequest(21.0, [], 0, 0))
    trace.close()
    lengths = [len(request.blocks) for request in trace]
    assert lengths == [*range(10_000, 11_000, 50), 5_001, 0]


# -- the formats -----------------------------------------------------------------------------------------


def test_mooncake(tmp_path):
    lines = [mooncake_line([0, 1, 2], at_ms=0), mooncake_line([0, 1, 5, 6], at_ms=1500, output=3)]
    loaded = load(write_lines(tmp_path / "trace.jsonl", lines))
    first, second = loaded.trace
    assert (loaded.format, loaded.trace.block_tokens, loaded.complaints.count) == ("mooncake", 512, 0)
    assert list(first.blocks)[:2] == list(second.blocks)[:2]
    assert not set(first.blocks[2:]) & set(second.blocks[2:])
    assert (second.timestamp_s, second.input_tokens, second.output_tokens) == (1.5, 2048, 3)
    assert first.session is None
    assert loaded.trace.misfits == 0


def test_bailian_names_a_conversation_after_its_first_chat(tmp_path):
    def chat(number: int, parent: int, ids: list[int], at_s: float) -> dict[str, object]:
        head = {"chat_id": number, "parent_chat_id": parent, "timestamp": at_s, "type": "text", "turn": 1}
        return {**head, "input_length": 16 * len(ids), "output_length": 5, "hash_ids": ids}

    lines = [chat(7, -1, [1, 2], 0.5), chat(8, 7, [1, 2, 3], 2.0), chat(9, 8, [1, 2, 3, 4], 3.0)]
    lines += [chat(10, -1, [1, 9], 2.5), chat(11, 4, [5], 4.0)]  # chat 4 was before the trace began
    loaded = load(write_lines(tmp_path / "trace.jsonl", lines))
    assert (loaded.format, loaded.trace.block_tokens) == ("bailian", 16)
    assert [request.session for request in loaded.trace] == ["7", "7", "10", "7", "4"]
    assert [request.timestamp_s for request in loaded.trace] == [0.5, 2.0, 2.5, 3.0, 4.0]


def test_weka_sessions_share_nothing_and_their_subagents_everything(tmp_path):
    inner = [turn(0.0, [1, 2, 8]), turn(2.0, [1, 2, 8, 9])]
    first = session("x", [turn(0.0, [1, 2], stop="tool_use"), subagent(10.0, inner), turn(20.0, [1, 2, 3])])
    second = session("y", [turn(5.0, [1, 2])])
    write_lines(tmp_path / "b.json", [json.dumps(second, indent=2)])
    write_lines(tmp_path / "a.json", [first])
    trace = load(tmp_path).trace
    times = [(request.timestamp_s, request.session) for request in trace]
    assert times == [(0, "0:x"), (5, "1:y"), (10, "0:x/a1"), (12, "0:x/a1"), (20, "0:x")]
    parent, other, child, child_again, parent_again = (list(request.blocks) for request in trace)
    assert child[:2] == parent == parent_again[:2]
    assert child_again[:3] == child
    assert not set(other) & set(parent)
    assert [request.stop for request in trace][:2] == ["tool_use", ""]
    assert trace.block_tokens == 64
    assert trace.misfits == 0  # the tokens after the last whole block are not in the ids


def test_weka_times_inside_a_subagent_may_count_from_the_session(tmp_path):
    whole = session("x", [turn(0.0, [1]), subagent(10.0, [turn(11.0, [1, 2]), turn(12.5, [1, 2, 3])])])
    trace = load(write_lines(tmp_path / "x.json", [whole])).trace
    assert [request.timestamp_s for request in trace] == [0, 11, 12.5]


def test_weka_sessions_may_start_one_after_the_other_and_share_ids(tmp_path):
    sessions = [session(name, [turn(0.0, [1, 2])], hash_id_scope="global") for name in "xyz"]
    path = write_lines(tmp_path / "sessions.jsonl", sessions)
    trace = load(path, session_gap_s=30).trace
    assert [request.timestamp_s for request in trace] == [0, 30, 60]
    assert extent(trace).unique_blocks == 2


def test_weka_comes_in_many_files(tmp_path):
    sessions = [session("x", [turn(0.0, [1, 2])]), session("y", [turn(1.0, [1, 2, 3])])]
    (tmp_path / "folder").mkdir()
    for each in sessions:
        write_lines(tmp_path / "folder" / f"{each['id']}.json", [each])
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(json.dumps(sessions).encode()))
    ways = [
        write_lines(tmp_path / "lines.jsonl", sessions),
        write_lines(tmp_path / "array.json", [json.dumps(sessions, indent=1)]),
        tmp_path / "packed.json.gz",
        tmp_path / "folder",
    ]
    read = [[(request.timestamp_s, list(request.blocks)) for request in load(way).trace] for way in ways]
    assert all(each == read[0] for each in read)
    assert all(load(way).format == "weka" for way in ways)


def test_weka_fields_may_be_in_any_order_or_missing(tmp_path):
    bare = {
        "requests": [{"hash_ids": [1, 2], "in": 130}, {"out": 3, "t": 4.0, "hash_ids": [1, 2, 3], "in": 192}]
    }
    loaded = load(write_lines(tmp_path / "x.json", [bare]))
    assert (loaded.format, len(loaded.trace), loaded.trace.block_tokens) == ("weka", 2, 64)


def test_csv_of_lengths(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:16:46.6805900+00:00,879,55\n"
    )
    loaded = load(path)
    assert loaded.format == "csv"
    assert isinstance(loaded.trace, LengthsTrace)
    assert (len(loaded.trace), loaded.trace.tokens) == (3, 1857)
    assert loaded.trace.span_s == pytest.approx(60.0)


@pytest.mark.parametrize(
    "lines",
    [
        ["Timestamp;Request tokens;Response tokens", "5,5;472;18", "45,5;1087,0;230"],
        ["Timestamp\tRequest tokens\tResponse tokens", "5.5\t472\t18", "45.5\t1087\t230"],
    ],
)
def test_csv_with_other_delimiters(tmp_path, lines):
    path = tmp_path / "lengths.csv"
    path.write_text("\n".join(lines) + "\n")
    trace = load(path).trace
    assert isinstance(trace, LengthsTrace)
    assert (list(trace.outputs), trace.span_s) == ([18, 230], 40.0)


# -- what is not as it should be -------------------------------------------------------------------------


def test_a_damaged_line_is_named_and_the_others_are_kept(tmp_path):
    good = [mooncake_line([0, number], at_ms=number) for number in range(1, 40)]
    damaged = [b'{"timestamp": 3, "input_length": 5, "hash', *good[:20], b"\xff\xfe", *good[20:]]
    loaded = load(write_lines(tmp_path / "trace.jsonl", [*damaged, b"", mooncake_line([0])]))
    assert len(loaded.trace) == 40
    assert loaded.complaints.count == 2
    assert loaded.complaints.first.startswith("trace.jsonl:1: ")


@pytest.mark.parametrize("line", [{}, {"input_length": None, "output_length": None, "timestamp": None}])
def test_without_lengths_a_prompt_has_whole_blocks(tmp_path, line):
    loaded = load(write_lines(tmp_path / "trace.jsonl", [{**line, "hash_ids": [1, 2, 3]}]))
    (request,) = loaded.trace
    assert (request.input_tokens, request.output_tokens, loaded.complaints.count) == (3 * 512, 0, 0)
    bailian = {**line, "hash_ids": [1, 2, 3], "chat_id": 5}
    (request,) = load(write_lines(tmp_path / "bailian.jsonl", [bailian])).trace
    assert (request.input_tokens, request.output_tokens, request.session) == (3 * 16, 0, "5")


def test_a_request_without_ids_does_not_cost_its_session(tmp_path):
    turns = [turn(float(number), range(number + 1)) for number in range(20)]
    del turns[7]["hash_ids"], turns[8]["in"], turns[9]["out"]
    loaded = load(write_lines(tmp_path / "session.jsonl", [session("a", turns)]))
    assert (len(loaded.trace), loaded.complaints.count) == (19, 1)
    assert "request 7 of 0:a has no hash_ids" in loaded.complaints.first
    assert loaded.trace[7].input_tokens == 64 * 9


def test_an_answer_of_unknown_length_has_none(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n1,900,\n2,800,5\n")
    trace = load(path).trace
    assert isinstance(trace, LengthsTrace)
    assert list(trace.outputs) == [0, 5]


@pytest.mark.parametrize(
    "line",
    [
        b'{"input_length": -5, "hash_ids": [1]}',
        b'{"input_length": 5, "hash_ids": [null]}',
        b'{"input_length": 5, "hash_ids": 7}',
        b'{"input_length": 1e300, "hash_ids": [1]}',
        b'{"input_length": 5}',
        b"[]",
        b"null",
    ],
)
def test_every_kind_of_damage_costs_its_line_only(tmp_path, line):
    good = [mooncake_line([number]) for number in range(20)]
    loaded = load(write_lines(tmp_path / "trace.jsonl", [*good, line]))
    assert len(loaded.trace) == 20
    assert loaded.complaints.first.startswith("trace.jsonl:21: ")


def test_a_file_that_is_mostly_something_else_is_refused(tmp_path):
    lines = [mooncake_line([1]), mooncake_line([2]), b"{}", mooncake_line([3])]
    with pytest.raises(UsageError, match=r"1 of 4 entries are unreadable, first trace\.jsonl:3: "):
        load(write_lines(tmp_path / "trace.jsonl", lines))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no requests"),
        (b"\n \n", "has no requests"),
        (b"a,b,c\n1,2,3\n", "foreign:1: not a trace"),
        (b"\x7fELF\x00\x01", "foreign:1: not a trace"),
        (b'{"answer": 42}\n', "foreign:1: no hash_ids"),
        (b'[{"answer": 42}]', "is JSON, but not a trace"),
        (b'{"a":\n', "neither a JSON document nor JSON lines"),
        (b'{"timestamp": 1, "hash_ids": ["\xff"]}\n' * 2, "neither a JSON document nor JSON lines"),
        (b'{"requests": ' + b"[" * 5000 + b"]" * 5000 + b"}", "neither a JSON document nor JSON lines"),
        (b'{"requests": 5}', "no readable session, first foreign: Expected"),
        (b"TIMESTAMP,ContextTokens\n", "has no requests"),
    ],
)
def test_foreign_files_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load(path)


def test_a_file_that_is_not_there_or_of_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no trace"):
        load(tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match="auto, mooncake, bailian, weka, csv"):
        load(tmp_path, format_name="parquet")
    with pytest.raises(UsageError, match="no readable session"):
        load(tmp_path)


def test_a_gzip_file_that_ends_early_is_read_up_to_there(tmp_path):
    lines = [mooncake_line([0, number], at_ms=number) for number in range(2000)]
    whole = write_lines(tmp_path / "whole.jsonl", lines).read_bytes()
    packed = gzip.compress(whole, mtime=0)
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    loaded = load(path)
    assert 1000 < len(loaded.trace) < 2000
    assert (loaded.complaints.count, loaded.complaints.first) == (
        1,
        "trace.jsonl.gz: the gzip file ends early",
    )
    assert [request.timestamp_s for request in loaded.trace] == [at / 1e3 for at in range(len(loaded.trace))]
    parts = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    path.write_bytes(b"".join(map(gzip.compress, parts)) + bytes(9))
    assert (len(load(path).trace), load(path).complaints.count) == (2000, 0)
    path.write_bytes(packed[:-4000] + bytes(4000))
    damaged = load(path)
    assert 1000 < len(damaged.trace) < 2000
    assert damaged.complaints.count > 0
    path.write_bytes(packed[:5])
    with pytest.raises(UsageError, match="has no requests"):
        load(path)


def test_a_damaged_session_costs_itself_only(tmp_path):
    for number in range(12):
        write_lines(tmp_path / f"{number:02}.json", [session(f"s{number}", [turn(0.0, [1])])])
    (tmp_path / "12.json").write_bytes(b'{"id": "cut", "requests": [{"t": 0.0, "in"')
    loaded = load(tmp_path)
    assert (len(loaded.trace), loaded.complaints.count) == (12, 1)
    assert loaded.complaints.first.startswith("12.json: ")


def test_requests_without_ids_or_with_other_blocks_are_told(tmp_path):
    sessions = [session(f"s{number}", [turn(0.0, [1])]) for number in range(30)]
    sessions[3] = session("no ids", [turn(0.0, [1]), {"t": 1.0, "type": "n", "in": 500, "out": 1}])
    sessions[4] = session("128", [turn(0.0, [1], block=128)], block_size=128)
    loaded = load(write_lines(tmp_path / "sessions.jsonl", sessions))
    assert loaded.complaints.first == "sessions.jsonl:4: request 1 of 3:no ids has no hash_ids"
    assert loaded.complaints.count == 2
    assert len(loaded.trace) == 29


def test_requests_out_of_order_and_without_times_keep_their_places(tmp_path):
    lines = [mooncake_line([1], at_ms=5000), mooncake_line([2], at_ms=None), mooncake_line([3], at_ms=1000)]
    trace = load(write_lines(tmp_path / "trace.jsonl", lines)).trace
    assert [request.timestamp_s for request in trace] == [1, 5, 5]
    assert [list(request.blocks) for request in trace] == [[2], [0], [1]]
    assert (trace.untimed, trace.reordered, trace.timed) == (1, True, True)


def test_blocks_of_another_size_are_noticed(tmp_path):
    lines = [{"input_length": 1024, "hash_ids": list(range(64))} for _ in range(3)]
    path = write_lines(tmp_path / "trace.jsonl", lines)
    assert load(path).trace.misfits == 3
    assert load(path, block_tokens=16).trace.misfits == 0
