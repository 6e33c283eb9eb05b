"""Check the project's prose: ``python tests/prose.py [PATH …]`` prints findings and exits 1 if there are any.

The check reads Markdown, docstrings, comments and every string of Python sources that looks like a
sentence (help, errors, log lines). It finds words and turns of phrase that make a text hard to read, and
sentences of more than 35 words. ``make lint`` runs it over the paths in :data:`CHECKED`.

A line that has to keep a finding says ``prose: ok`` in the same line or, in Markdown, in a comment above it.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("README.md", "CONTRIBUTING.md", "docs", "tierstore", "connectors", "engine", "tools", "examples")
LONGEST_SENTENCE = 35
"""Words. A code span counts as one."""

RULES = {
    "a person who does not exist": r"\b(?:[Ww]ho(?:m)?ever|[Nn]obody|[Ss]omebody|[Aa]nybody|[Ee]verybody)\b",
    "vague pronoun": r"\b(?:[Ww]hatever|[Ss]o many|[Tt]hat which|[Tt]hose which|of which)\b",
    "clause as subject": r"(?:^|(?<=[.!?;:] ))"
    r"(?:What|Who|Whose|Whom|Those (?:that|who|which|of|whose)|Which (?:is|are)|Where (?:it|they))"
    r"\b(?![^.!;]*\?)",
    "dropped subject": r"(?:^|(?<=[.!?] ))[Oo]f (?:a|an|the|these|those|each|what|its|two|all)\b",
    "idiom": r"\b(?:goes on|go on with|going on with|went on with|is not had|be had|for the sake of)\b",
}
"""Regular expressions that no sentence may match, by what is wrong."""

_RULES = {name: re.compile(pattern) for name, pattern in RULES.items()}
_EXCUSE = "prose: ok"
_CODE = re.compile(r"``[^`]+``|:\w+:`[^`]+`|`[^`]+`|\[[^\]]*\]\([^)]*\)|https?://\S+|<[^>]+>")
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"')\]]*\s+(?=[A-Z0-9`\"'(\[*])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|approx|No)\.(?=\s)")


@dataclass(frozen=True)
class Finding:
    """One sentence that breaks a rule."""

    path: str
    line: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.sentence}"


@dataclass(frozen=True)
class Text:
    """One paragraph of prose, and the line on which it begins."""

    line: int
    words: str


def findings_in(path: Path) -> list[Finding]:
    """Return the findings in one Markdown or Python file, in order of their lines."""
    source = path.read_text()
    texts = _markdown(source) if path.suffix == ".md" else _python(source)
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    return [
        Finding(name, text.line, rule, sentence)
        for text in texts
        for sentence in sentences(text.words)
        for rule in broken_rules(sentence)
    ]


def sentences(words: str) -> list[str]:
    """Split a paragraph into sentences, with code spans and links replaced by one word each.

    >>> sentences("Load `a.b c`. It returns.")
    ['Load CODE.', 'It returns.']
    """
    plain = _CODE.sub("CODE", words)
    plain = _ABBREVIATION.sub(r"\1", " ".join(plain.split()))
    return [sentence for sentence in _SENTENCE_END.split(plain) if sentence]


def broken_rules(sentence: str) -> list[str]:
    """Return the names of the rules that ``sentence`` breaks.

    >>> broken_rules("Nobody waits for it.")
    ['a person who does not exist']
    """
    broken = [name for name, rule in _RULES.items() if rule.search(sentence)]
    count = sum(any(character.isalpha() for character in word) for word in sentence.split())
    if count > LONGEST_SENTENCE:
        broken.append(f"{count} words")
    return broken


def files(names: list[str]) -> list[Path]:
    """Return the Markdown and Python files at or below ``names`` that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *names]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [ROOT / name for name in listed.split("\0") if name.endswith((".md", ".py"))]
    return [path for path in paths if path.exists()]


def _markdown(source: str) -> Iterator[Text]:
    """Yield the paragraphs, list items and table cells outside of code blocks."""
    block: list[str] = []
    start, fenced, excused = 1, False, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced, stripped = not fenced, ""
        elif fenced:
            continue
        cells = stripped.startswith("|")
        if block and (not stripped or cells or re.match(r"([-*#>]|\d+\.)\s", stripped)):
            if not excused:
                yield Text(start, " ".join(block))
            block, excused = [], False
        if _EXCUSE in stripped:
            excused = True
        elif cells:
            if not excused:
                yield from (Text(number, cell.strip()) for cell in stripped.strip("|").split("|"))
        elif stripped:
            start = start if block else number
            block.append(re.sub(r"^(?:[-*#>]+|\d+\.)\s+", "", stripped))


def _python(source: str) -> Iterator[Text]:
    """Yield docstrings by paragraph, comments, and string literals that look like sentences."""
    lines = source.splitlines()
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        texts: list[Text] = []
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "CODE" for part in node.values]
            texts = [Text(node.lineno, "".join(map(str, parts)))]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            texts = [Text(node.lineno, node.value)]
            if id(node) in docstrings:
                texts = list(_docstring(node.value, node.lineno))
        for text in texts:
            words = text.words.strip()
            if len(words.split()) >= 4 and "\n" not in words and _EXCUSE not in lines[text.line - 1]:
                yield text
    yield from _comments(source)


def _docstring(words: str, line: int) -> Iterator[Text]:
    """Yield the paragraphs and list items of a docstring, without its examples."""
    block: list[str] = []
    start, code = line, False
    for number, row in enumerate([*words.splitlines(), ""], line):
        stripped = row.strip()
        if stripped.startswith((">>>", "...", "```", "$ ")) or (code and stripped):
            code, stripped = True, ""
        elif not stripped:
            code = block[-1:] != [] and block[-1].endswith("::")
        if block and (not stripped or re.match(r"([-*]|\d+\.|\|)\s", stripped)):
            yield Text(start, " ".join(block))
            block = []
        if stripped:
            start = start if block else number
            block.append(re.sub(r"^(?:[-*]|\d+\.)\s+", "", stripped))


def _comments(source: str) -> Iterator[Text]:
    """Yield comments: lines of their own joined to paragraphs, trailing ones each by itself."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#: ").strip()
        trailing = bool(token.line[: token.start[1]].strip())
        if block and (trailing or token.start[0] != last + 1):
            yield Text(start, " ".join(block))
            block = []
        if _EXCUSE in words or words.startswith(("type:", "noqa", "pragma", "mypy:", "!")):
            continue
        start = start if block else token.start[0]
        block.append(words)
        last = -1 if trailing else token.start[0]
    if block:
        yield Text(start, " ".join(block))


def main(arguments: list[str]) -> int:
    """Print all findings below ``arguments`` (default: :data:`CHECKED`); return 1 if there are any."""
    found = [finding for path in files(arguments or list(CHECKED)) for finding in findings_in(path)]
    for finding in found:
        sys.stdout.write(f"{finding}\n")
    if found:
        sys.stdout.write(f"{len(found)} findings: subject, verb, object; one thought a sentence.\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
