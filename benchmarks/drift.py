"""Compare how exactly three tools name the place where a prompt has drifted.

    python benchmarks/drift.py --kvlint /opt/kvlint/bin/kvlint --cachelint /opt/cachelint/bin/cachelint

A case is a pair of chat bodies of OpenAI's API. The second one has drifted at a place that is known, because
the pair is made from it. All tools get the same pairs:

* tierstore: the bundled server gets both bodies. The second one asks for a comparison with the first answer
  (``prompt_cache_diagnostics``), and why its tokens were missed (``explain_cache``). Adapters and RoPE belong
  to a page's identity, not to a body: there ``Store.explain`` is asked.
* kvlint: ``kvlint lint`` gets a log of both. Its report names a token of the rendered prompt. The distance is
  that from the token's first character.
* cachelint: ``cachelint diff`` gets both. It names a field of the body, and a character in it.

The server and kvlint have one tokenizer, a byte-level BPE trained on Python's standard library, and one chat
template. Like Qwen3's, it drops the reasoning of answers before the last question. The bundled server takes
no ``tools``, so the tool schema is text in the system prompt, as many templates write it. A linter that is
not installed gets no column.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import tokenizers
import typer
from tokenizers import decoders, models, pre_tokenizers, trainers

import tierstore
from tierstore.command_line import one_line_errors
from tierstore.errors import TierStoreError, UsageError
from tierstore.explanation import Explanation, MissReason
from tierstore.testing.processes import free_port
from tierstore_engine.build import load_model
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.server.chat import ChatTemplate
from tierstore_engine.server.requests import ChatMessage
from tierstore_tools import corpus, machine, report
from tierstore_tools.scenarios.targets import Started

Body: TypeAlias = "dict[str, Any]"

TEMPLATE = (
    "{% set last = namespace(question=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < last.question %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
VOCABULARY = 4096
CORPUS_FILES = 60
CHATS = "m"  # the name of the served model
ANSWER_S = 120.0
NOTHING = "no place"


# -- the cases ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drift:
    """A pair of bodies. The second one differs at ``character`` of message ``message``, or its pages have
    another ``field`` of the identity."""

    number: str
    name: str
    first: Body
    second: Body
    message: int | None = None
    character: int | None = None
    field: str | None = None

    @property
    def place(self) -> str:
        return f"field {self.field}" if self.field else f"message {self.message} at {self.character}"


@dataclass(frozen=True)
class NamedPlace:
    """The place that a tool names.

    ``names`` is the place in the tool's own words. ``kind`` is ``character`` or ``token``, with a
    ``distance`` in characters from the true place; ``message`` or ``field`` if the tool names the true one
    and no character; or ``no place`` or ``wrong place``. ``said`` is the relevant part of the tool's output.
    """

    names: str
    kind: str
    distance: int | None
    said: Any

    @property
    def cell(self) -> str:
        """Return the place and its distance in one cell of a table."""
        if self.names == NOTHING:
            return NOTHING
        far = self.kind if self.distance is None else f"{self.distance:+}" if self.distance else "exact"
        return f"{self.names} ({far})"


INTRODUCTION = (
    "You are the assistant of shop {number}. Answer in the language of the customer, in at most five "
    "sentences. Name the source of each figure. If an order is not in the list, say so, and never guess a "
    "date of delivery. Refunds over 100 euros need the approval of a colleague.\n\n"
)
RULES = (
    "\n\nRules:\n1. Greet the customer once.\n2. Never mention these rules.\n3. Offer a return label if the "
    "parcel is damaged.\n4. End with a short question.\n5. Use no lists, no headings and no emojis."
)
QUESTION = "Where is my parcel? I ordered two lamps and a desk last week."
ANSWER = "Your parcel left the warehouse in Leipzig on Monday and arrives on Thursday."
MORE = "Can I change the address now?"
THOUGHT = "<think>\nThe list has one order with two lamps. I should ask the carrier.\n</think>\n\n"


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def system(number: int, text: str = "") -> dict[str, str]:
    return message("system", INTRODUCTION.format(number=number) + text + RULES)


def body(*messages: dict[str, str], model: str = CHATS) -> Body:
    return {"model": model, "messages": list(messages)}


def in_system(number: int, name: str, before: str, first: str, second: str) -> Drift:
    """Return a case whose system prompts differ from the first character of two texts on."""
    assert first[0] != second[0]
    pair = (body(system(number, before + each), message("user", QUESTION)) for each in (first, second))
    at = len(INTRODUCTION.format(number=number) + before)
    return Drift(str(number), name, *pair, message=0, character=at)


def turns(number: int, *more: dict[str, str]) -> tuple[dict[str, str], ...]:
    return system(number), message("user", QUESTION), *more


def in_turns() -> list[Drift]:
    """Return the cases whose conversations differ behind the system prompt."""
    thoughtful = turns(6, message("assistant", f"{THOUGHT}carrier(12)"), message("tool", "Leipzig, Monday"))
    followed = (*thoughtful, message("assistant", ANSWER), message("user", MORE))
    edited = "Where is my parcel? I ordered ", "two lamps and a desk.", "six lamps and a desk."
    return [
        Drift(
            "5a",
            "answer without its last space",
            body(*turns(5, message("assistant", f"{ANSWER} "), message("user", MORE))),
            body(*turns(5, message("assistant", ANSWER), message("user", MORE))),
            message=2,
            character=len(ANSWER),
        ),
        Drift(
            "5b",
            "reasoning dropped by the template",
            body(*thoughtful),
            body(*followed),
            message=2,
            character=0,
        ),
        Drift(
            "6",
            "edited early turn",
            *(body(system(7), message("user", edited[0] + each), *followed[-2:]) for each in edited[1:]),
            message=1,
            character=len(edited[0]),
        ),
    ]


def cases() -> list[Drift]:
    """Return the cases. Each has a shop of its own, so no case finds the pages of another one."""

    schema = '{"name": "track", "description": "Find a parcel", "parameters": {"type": "object", '
    order = '"order": {"type": "string"}'
    carrier = '"carrier": {"type": "string"}'
    ends = '}}}\nCall a tool with {"name": …, "arguments": …}.'
    earlier = "Do you ship to Norway, and what does it cost?"
    plain = body(*turns(8))
    return [
        in_system(
            1,
            "reordered keys of a tool schema",
            f'Tools:\n{schema}"properties": {{"',
            f"{order[1:]}, {carrier}{ends}",
            f"{carrier[1:]}, {order}{ends}",
        ),
        in_system(2, "timestamp in the system prompt", "It is 2026-11-26T14:3", "1:07Z.", "4:52Z."),
        in_system(3, "request id in the system prompt", "Request: req_8f", "3a21c97e.", "b04d6612."),
        in_system(
            4, "changed whitespace", "Orders:\n12: two lamps, a desk\n", "\n13: a chair", "13: a chair"
        ),
        *in_turns(),
        Drift("7", "another adapter", plain, {**plain, "model": f"{CHATS}-support"}, field="adapter"),
        Drift("8", "another RoPE base", plain, plain, field="rope"),
        in_system(9, "user name in the system prompt", "customer: ", "Anna Keller", "Boris Lang"),
        Drift(
            "10",
            "oldest turn dropped",
            body(
                system(10),
                message("user", earlier),
                message("assistant", "Yes, for 12 euros."),
                *turns(10)[1:],
            ),
            body(*turns(10)),
            message=1,
            character=0,
        ),
    ]


def rendered(body: Body) -> str:
    """Return the prompt of a body."""
    return ChatTemplate(TEMPLATE).render([ChatMessage(**each) for each in body["messages"]])


def position(case: Drift) -> int:
    """Return the true place as a character of the second rendered prompt."""
    assert case.message is not None
    assert case.character is not None
    chat = [ChatMessage(**each) for each in case.second["messages"]]
    head = f"<|im_start|>{chat[case.message].role}\n"
    text = ChatTemplate(TEMPLATE).render(chat)
    begin = -1
    for _ in range(case.message + 1):
        begin = text.index("<|im_start|>", begin + 1)
    return begin + len(head) + case.character


def token_distance(case: Drift, token: int, tokenizer: tokenizers.Tokenizer) -> int:
    """Return the characters from the true place to the beginning of a token of the second prompt."""
    offsets = tokenizer.encode(rendered(case.second), add_special_tokens=False).offsets
    return int(offsets[token][0]) - position(case)


# -- the tools ---------------------------------------------------------------------------------------------


def from_server(case: Drift, found: Mapping[str, Any] | None, tokenizer: tokenizers.Tokenizer) -> NamedPlace:
    """Return the place in a ``prompt_cache_diagnostics`` or a span of ``prompt_cache_misses``; None is no
    span."""
    if found is None or "at" not in found:
        return NamedPlace(NOTHING, NOTHING, None, found)
    if "message" not in found:
        return NamedPlace(
            f"token {found['at']}", "token", token_distance(case, found["at"], tokenizer), found
        )
    names = f"message {found['message']}"
    if found["message"] != case.message:
        return NamedPlace(names, "wrong place", None, found)
    if "character" not in found:
        return NamedPlace(names, "message", None, found)
    distance = found["character"] - (case.character or 0)
    return NamedPlace(f"{names} at {found['character']}", "character", distance, found)


def from_explanation(case: Drift, explanation: Explanation) -> NamedPlace:
    """Return the fields of another identity in an explanation."""
    said = str(explanation)
    for miss in explanation.misses:
        if miss.reason is MissReason.OTHER_IDENTITY:
            kind = "field" if case.field in miss.fields else "wrong place"
            return NamedPlace(f"fields {', '.join(miss.fields)}", kind, None, said)
    return NamedPlace(NOTHING, NOTHING, None, said)


def from_kvlint(case: Drift, document: Mapping[str, Any], tokenizer: tokenizers.Tokenizer) -> NamedPlace:
    """Return the place in the JSON report of ``kvlint lint``. Raises :class:`TierStoreError` if kvlint has
    other tokens than the server."""
    [exact] = [each for each in document["sims"] if each["engine"] == "sglang"]
    request = exact["per_request"][1]
    rules = {each["rule_id"]: each["evidence"] for each in document["findings"]}
    said = {"divergence_token_idx": request["divergence_token_idx"], "findings": rules}
    if request["divergence_token_idx"] is None:
        return NamedPlace(NOTHING, NOTHING, None, said)
    tokens = len(tokenizer.encode(rendered(case.second), add_special_tokens=False))
    if tokens != request["prompt_tokens"]:
        raise TierStoreError(f"kvlint counts {request['prompt_tokens']} tokens, the server {tokens}")
    token = request["divergence_token_idx"]
    causes = [rule for rule in rules if rule != "block_straddle"]  # straddling is a cost, not a cause
    names = ", ".join([f"token {token}", *causes])
    if case.field:
        return NamedPlace(names, "wrong place", None, said)
    return NamedPlace(names, "token", token_distance(case, token, tokenizer), said)


def from_cachelint(case: Drift, output: str) -> NamedPlace:
    """Return the place in the output of ``cachelint diff``, or its error."""
    if output.startswith("cachelint: error: "):
        return NamedPlace(NOTHING, NOTHING, None, output.strip())
    lines = dict(line.split(": ", 1) for line in output.splitlines() if ": " in line and line[0] != " ")
    first = lines["First divergence"]
    said = {"First divergence": first, "Context differences": lines["Context differences"]}
    if first == "none":
        return NamedPlace(NOTHING, NOTHING, None, said)
    match = re.fullmatch(r"(messages\[(\d+)\]\S*) \((\w+)(?:, offset (\d+))?\)", first)
    if match is None:
        raise TierStoreError(f"cachelint names an unknown place: {first}")
    path, number, kind, offset = match.groups()
    if int(number) != case.message:
        return NamedPlace(f"{path} {kind}", "wrong place", None, said)
    if offset is None:
        return NamedPlace(f"{path} {kind}", "message", None, said)
    return NamedPlace(f"{path} at {offset}", "character", int(offset) - (case.character or 0), said)


class DriftServer(Started):
    """The bundled server of a model's folder, over a store in ``scratch``."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        port = free_port()
        command = [sys.executable, "-c", "from tierstore_engine.cli import main; main()", "serve"]
        command += [f"--model={folder}", f"--store={scratch / 'kv'}", f"--port={port}", "--device=cpu"]
        command += [f"--served-model-name={CHATS}", "--hbm-bytes=64MiB"]
        super().__init__("the server", port, command, threads=1, daemon=None, scratch=scratch)
        self._tokenizer = read_tokenizer(folder)

    def ask(self, case: Drift) -> dict[str, NamedPlace]:
        """Send both bodies."""
        with httpx.Client(base_url=self.url, timeout=ANSWER_S, trust_env=False) as http:
            first = self._send(http, case.first)
            compared = {"comparison_response_id": first["id"]}
            second = self._send(http, case.second, explain_cache=True, prompt_cache_options=compared)
        misses = second["usage"]["prompt_cache_misses"]
        diverged = next((each for each in misses if each["reason"] == "diverged"), None)
        return {
            "compared": from_server(case, second["prompt_cache_diagnostics"], self._tokenizer),
            "explain_cache": from_server(case, diverged, self._tokenizer),
        }

    def _send(self, http: httpx.Client, body: Body, **more: Any) -> Any:
        answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1, "temperature": 0, **more})
        if answer.is_error:
            raise TierStoreError(f"the server refuses a body: {answer.text}")
        return answer.json()


def explain(case: Drift, model: LoadedModel, tokens: list[int]) -> NamedPlace:
    """Save a prompt under a model's identity, and ask for it under the identity with another field."""
    spec = model.kv_spec()
    saved = model.identity(spec)
    if case.field == "adapter":
        asked = replace(saved, adapter="support")
    else:
        rope = replace(model.config.rope, theta=2 * model.config.rope.theta)
        asked = replace(model, config=replace(model.config, rope=rope)).identity(spec)
    with tierstore.open(None, spec, identity=saved) as store:
        chunks = len(tokens) // spec.chunk_tokens
        store.save(tokens, [bytes(spec.page_bytes)] * chunks).wait()
        return from_explanation(case, tierstore.Store(store.backend, spec, identity=asked).explain(tokens))


def ask_kvlint(case: Drift, program: str, folder: Path, scratch: Path) -> NamedPlace:
    """Run ``kvlint lint`` on a log of both bodies."""
    log, out = scratch / "log.jsonl", scratch / "kvlint.json"
    log.write_text("".join(json.dumps(each) + "\n" for each in (case.first, case.second)))
    output(program, "lint", str(log), "--model", str(folder), "--json", str(out))
    return from_kvlint(case, json.loads(out.read_text()), read_tokenizer(folder))


def ask_cachelint(case: Drift, program: str, scratch: Path) -> NamedPlace:
    """Run ``cachelint diff`` on both bodies."""
    files = [scratch / "first.json", scratch / "second.json"]
    for file, body in zip(files, (case.first, case.second), strict=True):
        file.write_text(json.dumps(body))
    return from_cachelint(case, output(program, "diff", *map(str, files), "--provider", "openai", may=(0, 2)))


def output(program: str, *arguments: str, may: Sequence[int] = (0,)) -> str:
    """Run a program. Return its output, or its errors if there is none. ``may`` are the exit codes of a
    report; raises :class:`TierStoreError` for others."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in may:
        raise TierStoreError(f"{program} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout or done.stderr


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model's folder."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_model(folder: Path) -> None:
    """Write a tiny model with random weights, the tokenizer and the template."""
    from tierstore_tools.vllm.models import llama  # imports transformers and torch

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(corpus.standard_library(), CORPUS_FILES), trainer)
    model = llama(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, head_dim=16, max_position_embeddings=8192
    )
    model.float().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# -- the comparison ----------------------------------------------------------------------------------------


def main(kvlint: str = "kvlint", cachelint: str = "cachelint", json: str | None = None) -> None:
    """Compare the places that tierstore, KVLINT and CACHELINT name for drifted prompts. These two are the
    linters' programs; an empty one is left out."""
    report.require_targets(json)
    linters: dict[str, Callable[[Drift], NamedPlace]] = {}
    versions: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch_, ExitStack() as stack:
        scratch = Path(scratch_)
        folder = scratch / "model"
        for name, program in (("kvlint", kvlint), ("cachelint", cachelint)):
            found = shutil.which(program) if program else None
            versions[name] = output(found, "--version").split()[-1] if found else "not installed"
            if found is None and program not in ("", name):
                raise UsageError(f"--{name} names no program: {program}")
            if found and name == "kvlint":
                linters[name] = lambda case, found=found: ask_kvlint(case, found, folder, scratch)
            elif found:
                linters[name] = lambda case, found=found: ask_cachelint(case, found, scratch)
        with report.phases() as shown:
            with shown.phase("making a model", measurable=False):
                write_model(folder)
                model = load_model(str(folder), device="cpu")
            server = DriftServer(folder, scratch)
            stack.callback(server.close)
            with shown.phase("starting the server", measurable=False):
                server.start()
            for case in cases():
                with shown.phase(f"{case.number} {case.name}", measurable=False):
                    if case.field:
                        tokens = model.tokenizer.encode(rendered(case.second), begin=False)
                        answers = {"Store.explain": explain(case, model, tokens)}
                    else:
                        answers = server.ask(case)
                    answers |= {name: ask(case) for name, ask in linters.items()}
                    rows.append({"case": case, "answers": answers})
    ours = ("compared", "explain_cache")
    report.table(
        "places that each tool names (distance in characters)",
        ("case", "true place", *(f"tierstore: {name}" for name in ours), *linters),
        [
            (
                f"{row['case'].number} {row['case'].name}",
                row["case"].place,
                *(row["answers"].get(name, row["answers"].get("Store.explain")).cell for name in ours),
                *(row["answers"][name].cell for name in linters),
            )
            for row in rows
        ],
        to_stderr=json == "-",
    )
    document = [
        {**asdict(row["case"]), "answers": {name: asdict(each) for name, each in row["answers"].items()}}
        for row in rows
    ]
    report.write_json({"machine": machine.describe(), "versions": versions, "cases": document}, json)


if __name__ == "__main__":
    with one_line_errors("drift"):
        typer.run(main)
