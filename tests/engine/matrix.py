"""Which features of the bundled engine work together: one table for the tests and for docs/serving.md.

``AXES`` has the features and their values; the first value of each is what an engine has without options.
``REFUSALS`` has the pairs of values that do not work together, and the sentence that refuses them at the
start. Every other pair works: ``test_matrix.py`` runs rows that have every pair that is not refused.

``python -m tests.engine.matrix`` writes the table into docs/serving.md, and a test compares the two. A
feature that learns to work with another one loses its line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import TypeAlias

Pair: TypeAlias = tuple[tuple[str, str], tuple[str, str]]
"""Two values, each as (axis, value), in the order of the axes."""

FAMILIES: Mapping[str, str] = {
    "full": "tiny",
    "experts": "tiny-moe",
    "latents": "tiny-deepseek",
    "windows": "tiny-gemma3",
    "chunks": "tiny-llama4",
    "sinks": "tiny-gpt-oss",
    "delta": "tiny-qwen3-next",
    "mamba": "tiny-granite-hybrid",
    "states": "tiny-mamba2",
    "placed images": "qwen",
    "mutual images": "gemma",
    "crossed images": "mllama",
}
"""A preset of each kind of model. ``delta`` and ``mamba`` have states and attention, ``states`` has no
attention. The last three are models of ``pictured.py``, whose prompts have images."""

PICTURED = ("placed images", "mutual images", "crossed images")

AXES: Mapping[str, Sequence[str]] = {
    "family": tuple(FAMILIES),
    "kv": ("auto", "int8", "fp8_e4m3", "int4", "k8v4", "static"),
    "draft": ("none", "lookup", "model", "alike", "mtp"),
    "store": ("pool", "host", "disk", "daemon", "other host"),
    "n": ("1", "3"),
    "parked": ("no", "yes"),
    "handover": ("no", "yes"),
    "deterministic": ("no", "yes"),
    "plan": ("load", "both-ends"),
    "ranks": ("1", "2"),
    "parts": ("1", "2"),
}

LABELS: Mapping[tuple[str, str], str] = {
    ("family", "full"): "full attention",
    ("family", "experts"): "with experts",
    ("family", "latents"): "latents (MLA)",
    ("family", "windows"): "windows",
    ("family", "chunks"): "attention chunks",
    ("family", "sinks"): "attention sinks",
    ("family", "delta"): "delta rule + attention",
    ("family", "mamba"): "Mamba-2 + attention",
    ("family", "states"): "states only",
    ("family", "placed images"): "images (Qwen2.5-VL)",
    ("family", "mutual images"): "images (Gemma 3)",
    ("family", "crossed images"): "images (Llama 3.2 Vision)",
    ("kv", "int8"): "`--kv-dtype int8`",
    ("kv", "fp8_e4m3"): "`--kv-dtype fp8_e4m3`",
    ("kv", "int4"): "`--kv-dtype int4`",
    ("kv", "k8v4"): "`--kv-dtype k8v4`",
    ("kv", "static"): "static scales (`--kv-scales`)",
    ("draft", "lookup"): "`--draft prompt-lookup`",
    ("draft", "model"): "`--draft MODEL`",
    ("draft", "alike"): "a draft model of this kind",
    ("draft", "mtp"): "`--draft mtp`",
    ("store", "pool"): "hits in the pool",
    ("store", "host"): "hits in host memory",
    ("store", "disk"): "hits on disk",
    ("store", "daemon"): "a daemon",
    ("store", "other host"): "pages of other hosts",
    ("n", "3"): "`n`, `best_of`",
    ("parked", "yes"): "preemption",
    ("handover", "yes"): "hand-over",
    ("deterministic", "yes"): "`--deterministic`",
    ("plan", "both-ends"): "`--plan both-ends`",
    ("ranks", "2"): "`--tensor-parallel`",
    ("parts", "2"): "`--sequence-parallel`",
}
"""The names of the values in the documents. The others are what an engine has without options."""


@dataclass(frozen=True)
class Refusal:
    """Values of one axis that are refused together with values of another one, and the engine's sentence.
    ``{}`` stands for what depends on the values."""

    one: tuple[str, tuple[str, ...]]
    other: tuple[str, tuple[str, ...]]
    sentence: str

    @property
    def pairs(self) -> Iterator[Pair]:
        """Yield the refused pairs."""
        (axis, values), (other, others) = self.one, self.other
        for value, with_ in product(values, others):
            yield (axis, value), (other, with_)


_QUANTISED = AXES["kv"][1:]

REFUSALS = (
    Refusal(
        ("family", ("states",)),
        ("kv", tuple(_QUANTISED)),
        "--kv-dtype is for keys and values: this model keeps only states",
    ),
    Refusal(
        ("family", ("latents",)),
        ("kv", ("k8v4",)),
        "latents are keys and values at once: give --kv-dtype one format for both",
    ),
    Refusal(
        ("family", ("states",)),
        ("ranks", ("2",)),
        "--tensor-parallel divides attention and MLPs: this model has only recurrent states",
    ),
    Refusal(
        ("family", ("states",)),
        ("parts", ("2",)),
        "--sequence-parallel divides keys and values: this model has only recurrent states",
    ),
    Refusal(
        ("family", ("crossed images",)),
        ("kv", ("static",)),
        "--kv-scales does not work with cross attention: leave it out",
    ),
    Refusal(
        ("family", ("crossed images",)),
        ("draft", ("model", "alike")),
        "--draft MODEL does not work with cross attention: give --draft prompt-lookup",
    ),
    Refusal(
        ("family", ("crossed images",)),
        ("deterministic", ("yes",)),
        "--deterministic does not work with cross attention",
    ),
    Refusal(
        ("family", ("crossed images",)),
        ("ranks", ("2",)),
        "--tensor-parallel does not work with cross attention",
    ),
    Refusal(
        ("family", ("crossed images",)),
        ("parts", ("2",)),
        "--sequence-parallel does not work with cross attention",
    ),
    Refusal(
        ("deterministic", ("yes",)),
        ("parts", ("2",)),
        "--sequence-parallel does not work with --deterministic",
    ),
    Refusal(
        ("draft", ("mtp",)),
        ("parts", ("2",)),
        "--sequence-parallel does not work with --draft mtp",
    ),
    Refusal(
        ("deterministic", ("yes",)),
        ("ranks", ("2",)),
        "--tensor-parallel does not work with --deterministic",
    ),
    Refusal(
        ("family", tuple(name for name in FAMILIES if name not in ("latents", "delta"))),
        ("draft", ("mtp",)),
        "--draft mtp is for DeepSeek V3 and Qwen3-Next, and this model has no {}: give another --draft",
    ),
    Refusal(
        ("kv", ("static",)),
        ("draft", ("mtp",)),
        "--draft mtp has no static scales of KV: leave out --kv-scales, or --draft mtp",
    ),
    Refusal(
        ("draft", ("mtp",)),
        ("ranks", ("2",)),
        "--tensor-parallel does not work with --draft mtp",
    ),
)

REFUSED: Mapping[Pair, Refusal] = {pair: refusal for refusal in REFUSALS for pair in refusal.pairs}


@dataclass(frozen=True)
class Row:
    """One value of each axis."""

    values: tuple[str, ...]

    @classmethod
    def of(cls, **values: str) -> Row:
        """Return a row with these values, and the first value of every other axis."""
        return cls(tuple(values.get(axis, every[0]) for axis, every in AXES.items()))

    def __getitem__(self, axis: str) -> str:
        return self.values[tuple(AXES).index(axis)]

    def __str__(self) -> str:
        return ",".join(value for axis, value in self.items if value != AXES[axis][0]) or "plain"

    @property
    def items(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(AXES, self.values, strict=True))

    @property
    def pairs(self) -> Iterator[Pair]:
        return combinations(self.items, 2)

    @property
    def works(self) -> bool:
        """Return whether no pair of its values is refused."""
        return not any(pair in REFUSED for pair in self.pairs)


def all_pairs() -> list[Row]:
    """Return few rows that together have every pair of values that is not refused.

    Each row begins with the first pair that is still missing, and takes for each further axis the value with
    the most missing pairs, of equal ones the value that was used least. The order is always the same.
    """
    axes = list(AXES)
    every = ((one, other) for one, other in combinations(axes, 2))
    missing = {
        ((one, value), (other, with_)): None
        for one, other in every
        for value, with_ in product(AXES[one], AXES[other])
        if ((one, value), (other, with_)) not in REFUSED
    }
    used: dict[tuple[str, str], int] = {}
    rows: list[Row] = []
    while missing:
        chosen = dict(next(iter(missing)))
        for axis in sorted(axes, key=lambda axis: -len(AXES[axis])):
            if axis not in chosen:
                chosen[axis] = min(
                    (value for value in AXES[axis] if not _among(REFUSED, chosen, axis, value)),
                    key=lambda value: (
                        -_among(missing, chosen, axis, value),
                        used.get((axis, value), 0),
                        AXES[axis].index(value),
                    ),
                )
        row = Row.of(**chosen)
        for pair in row.pairs:
            missing.pop(pair, None)
        for item in row.items:
            used[item] = used.get(item, 0) + 1
        rows.append(row)
    return rows


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` of ``rows``: each next one is that with the most values, and then with the most pairs,
    that no earlier one has."""
    found: list[Row] = []
    values: set[tuple[str, str]] = set()
    pairs: set[Pair] = set()
    for _ in range(count):
        left = (row for row in rows if row not in found)
        best = max(left, key=lambda row: (len({*row.items} - values), len({*row.pairs} - pairs)))
        found.append(best)
        values.update(best.items)
        pairs.update(best.pairs)
    return found


def _among(pairs: Mapping[Pair, object], chosen: Mapping[str, str], axis: str, value: str) -> int:
    """Return how many of ``pairs`` this value makes with the chosen ones."""
    axes = list(AXES)
    return sum(
        tuple(sorted(((axis, value), item), key=lambda each: axes.index(each[0]))) in pairs
        for item in chosen.items()
    )


# -- docs/serving.md ---------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
_BEGIN, _END = "<!-- matrix: python -m tests.engine.matrix -->\n", "<!-- end of matrix -->\n"


def table() -> str:
    """Return the table in Markdown: the features that not every family has, and the sentences of the
    refusals. The other features are listed before it."""
    features = [(axis, value) for axis, values in AXES.items() for value in values]
    features = [each for each in features if each in LABELS and each[0] != "family"]
    limited = [each for each in features if any((("family", name), each) in REFUSED for name in FAMILIES)]
    lines = ["Every kind of model works with", ""]
    for axis in AXES:
        everywhere = [LABELS[each] for each in features if each not in limited and each[0] == axis]
        lines += [f"- {', '.join(everywhere)}"] if everywhere else []
    lines.append("")
    lines.append("| | " + " | ".join(LABELS["family", name] for name in FAMILIES) + " |")
    lines.append("|---" * (len(FAMILIES) + 1) + "|")
    for feature in limited:
        cells = [_cell((("family", name), feature)) for name in FAMILIES]
        lines.append(f"| {LABELS[feature]} | " + " | ".join(cells) + " |")
    lines.append("")
    for number, refusal in enumerate(REFUSALS, 1):
        sides = [_side(axis, values) for axis, values in (refusal.one, refusal.other)]
        lines.append(f"{number}. {' with '.join(sides)}: *{refusal.sentence.replace('{}', '…')}*")
    return "\n".join(lines) + "\n"


def _side(axis: str, values: Sequence[str]) -> str:
    """Return the names of the values of an axis: those that are left out, if these are fewer families."""
    rest = [value for value in AXES[axis] if value not in values]
    if axis == "family" and len(rest) < len(values):
        return f"every kind of model but {', '.join(LABELS[axis, value] for value in rest)}"
    return ", ".join(LABELS[axis, value] for value in values)


def _cell(pair: Pair) -> str:
    refusal = REFUSED.get(pair)
    return "yes" if refusal is None else f"no ({REFUSALS.index(refusal) + 1})"


def documented(text: str) -> str:
    """Return the document ``text`` with the table as it is now. Raises :class:`ValueError` without a place
    for it."""
    before, _, rest = text.partition(_BEGIN)
    _, found, after = rest.partition(_END)
    if not found:
        raise ValueError(f"{DOCUMENT} has no place for the table")
    return before + _BEGIN + "\n" + table() + "\n" + _END + after


if __name__ == "__main__":
    DOCUMENT.write_text(documented(DOCUMENT.read_text()))
