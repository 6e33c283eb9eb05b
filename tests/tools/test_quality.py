"""``tierstore-bench quality`` on a tiny model."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tierstore.errors import UsageError
from tierstore_tools import quality
from tierstore_tools.quality import Quality

DTYPES = ("int8", "fp8_e4m3", "k8v4", "int4")


def test_fewer_bits_cost_more(tmp_path):
    out = tmp_path / "out.json"
    quality.run(Quality("tiny", 700, DTYPES), json=str(out))
    rows = {row["kv_dtype"]: row for row in json.loads(out.read_text())["rows"]}
    exact = rows["auto"]
    assert (exact["logit_error"], exact["top1_agreement"], exact["divergence"]) == (0, 1, 0)
    errors = [rows[name]["logit_error"] for name in ("auto", *DTYPES)]
    assert errors == sorted(errors)
    assert errors[1] > 0
    for row in rows.values():
        assert row["logit_error"] <= row["largest_logit_error"]
        assert row["perplexity"] == pytest.approx(exact["perplexity"], rel=0.5)
    # Vectors of 16: 64 bytes as floats, 16 of codes and 2 of a scale, or 8 and 2.
    by_vector = {name: row["bytes_per_token"] / (2 * 2) for name, row in rows.items()}
    assert by_vector == {"auto": 128, "int8": 36, "fp8_e4m3": 36, "k8v4": 28, "int4": 20}


def test_the_sums_are_those_of_the_formulas():
    exact = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    ours = torch.tensor([[0.0, 3.0, 2.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    sums = quality._Sums()
    sums.add(ours[:2], exact[:2], torch.tensor([1, 0]))
    sums.add(ours[2:], exact[2:], torch.tensor([], dtype=torch.int64))
    row = sums.row("int8", 1.0)
    assert row.logit_error == pytest.approx(math.sqrt(4 / 9))
    assert (row.largest_logit_error, row.top1_agreement) == (2.0, 2 / 3)
    chosen = ours[:2].softmax(-1)[[0, 1], [1, 0]]
    assert row.perplexity == pytest.approx(math.exp(-chosen.log().mean()), rel=1e-6)
    expected = torch.nn.functional.kl_div(
        ours.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert row.divergence == pytest.approx(float(expected) / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (Quality("tiny", 100, ("int3",)), "unknown KV dtype"),
        (Quality("tiny", 9000, ("int8",)), "allows 8192"),
        (Quality("tiny", 100, ("int8",), kv_scales="gone.json"), "cannot read gone.json"),
    ],
)
def test_bad_usage(settings, says):
    with pytest.raises(UsageError, match=says):
        quality.run(settings, json=None)
