"""The cubin cache, and what is said where a part of the tool chain is missing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tierstore_engine.errors import KernelError
from tierstore_engine.kernels import cubins, toolkit
from tierstore_engine.kernels.catalog import PAGE_COPY, kernel_set
from tierstore_engine.kernels.cubins import CubinCache
from tierstore_engine.kernels.cupy_launcher import CupyLauncher
from tierstore_engine.kernels.toolkit import find_toolkit


@pytest.fixture
def compiler() -> None:
    try:
        find_toolkit()
    except KernelError as error:
        pytest.skip(f"kernels cannot be compiled: {error}")


@pytest.mark.usefixtures("compiler")
class TestCache:
    def test_compiles_once(self, tmp_path: Path) -> None:
        first, second = CubinCache(tmp_path), CubinCache(tmp_path)
        cubin = first.get(PAGE_COPY, "sm_90")
        assert cubin.image.startswith(b"\x7fELF")
        assert cubin.symbol == "_Z9page_copyPKyS0_ii"
        assert second.get(PAGE_COPY, "sm_90") == cubin
        assert (first.compiled, second.compiled) == (1, 0)
        assert len(list(tmp_path.iterdir())) == 1

    def test_templates_have_one_entry(self, tmp_path: Path) -> None:
        kernels = kernel_set(dtype="bfloat16", head_dim=64, group=4, page_tokens=64)
        # Two kernels in one file: each cubin has the one that was asked for.
        symbols = [
            CubinCache(tmp_path).get(part, "sm_80").symbol for part in (kernels.combine, kernels.merge)
        ]
        assert "combine_splits" in symbols[0]
        assert "merge_states" in symbols[1]

    def test_architectures_are_kept_apart(self, tmp_path: Path) -> None:
        cache = CubinCache(tmp_path)
        assert cache.get(PAGE_COPY, "sm_80").image != cache.get(PAGE_COPY, "sm_90").image

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
    def test_damage_is_noticed_and_mended(self, tmp_path: Path, damage: str) -> None:
        cache = CubinCache(tmp_path)
        cubin = cache.get(PAGE_COPY, "sm_90")
        [file] = tmp_path.iterdir()
        flipped = bytes([cubin.image[100] ^ 1])
        damaged = {
            "truncated": cubin.image[:1000],
            "flipped": cubin.image[:100] + flipped + cubin.image[101:],
            "empty": b"",
        }
        file.write_bytes(damaged[damage])
        assert cache.get(PAGE_COPY, "sm_90") == cubin
        assert cache.compiled == 2
        assert [found.read_bytes() for found in tmp_path.iterdir()] == [cubin.image]

    def test_new_text_is_a_new_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = CubinCache(tmp_path)
        cache.get(PAGE_COPY, "sm_90")
        monkeypatch.setattr(cubins, "source_digest", lambda sources: "another text")
        cache.get(PAGE_COPY, "sm_90")
        assert cache.compiled == 2

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        occupied = tmp_path / "file"
        occupied.write_text("not a folder")
        cache = CubinCache(occupied)
        assert cache.get(PAGE_COPY, "sm_90").symbol
        assert cache.get(PAGE_COPY, "sm_90").symbol
        assert cache.compiled == 2


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolkit, "_places", lambda: iter([(tmp_path, tmp_path)]))
    with pytest.raises(
        KernelError,
        match=r"NVRTC.* not found: pip install 'tierstore\[cuda13\]' \(in a checkout.*nvidia-cuda-nvrtc",
    ):
        find_toolkit()
    (tmp_path / "libnvrtc.so.13").write_bytes(b"")
    with pytest.raises(KernelError, match=r"cuda_fp16.h.* not found: pip install .*nvidia-cuda-runtime"):
        find_toolkit()
    (tmp_path / "cuda_fp16.h").write_bytes(b"")
    with pytest.raises(KernelError, match=r"cannot load NVRTC at .*libnvrtc\.so\.13"):
        CubinCache(tmp_path).get(PAGE_COPY, "sm_90")


def test_the_driver_decides_between_toolkits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch may have brought another CUDA than CuPy uses."""
    for name in ("13", "12"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"libnvrtc.so.{name}").write_bytes(b"")
        (folder / "cuda_fp16.h").write_bytes(b"")
    monkeypatch.setattr(
        toolkit, "_places", lambda: iter([(tmp_path / n, tmp_path / n) for n in ("13", "12")])
    )
    assert find_toolkit().include.name == "13"
    assert find_toolkit(newest=13).include.name == "13"
    assert find_toolkit(newest=12) == toolkit.Toolkit(tmp_path / "12" / "libnvrtc.so.12", tmp_path / "12")
    with pytest.raises(KernelError, match="NVRTC for a driver of CUDA 11"):
        find_toolkit(newest=11)


def test_missing_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelError, match=r"CuPy.* not installed: pip install 'tierstore\[cuda13\]'"):
        CupyLauncher("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_missing_device() -> None:
    with pytest.raises(KernelError, match="torch sees no CUDA device for 'cuda'"):
        CupyLauncher("cuda")
