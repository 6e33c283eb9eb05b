from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tierstore import copying, native
from tierstore.keys import TOKEN_BYTES, chunk_keys

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | None:
    """The compiled part as processors without AVX2 have it."""
    if COMPILER is None:
        return None
    built = tmp_path_factory.mktemp("native") / "_pages.so"
    source = native.FILE.with_name("pages.c")
    command = [COMPILER, "-O2", "-Wall", "-Wextra", "-Werror", "-DPORTABLE", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(built), str(source)], check=True)
    library = native.load(built)
    assert library is not None
    return library


@pytest.fixture(params=["compiled", "portable", "python"])
def way(request: pytest.FixtureRequest, portable: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way that bytes are copied."""
    libraries = {"compiled": native.LIBRARY, "portable": portable, "python": None}
    library = libraries[request.param]
    if library is None and request.param != "python":
        pytest.skip("no C compiler")
    monkeypatch.setattr(native, "LIBRARY", library)
    return request.param


@needs_compiler
def test_the_compiled_part_is_there() -> None:
    assert native.LIBRARY is not None


SIZES = st.one_of(st.integers(1, 4096), st.sampled_from([1024, 4096, 16384, 65536]), st.integers(1, 200_000))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nbytes=SIZES,
    count=st.integers(0, 20),
    shifts=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    read_next=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@example(nbytes=1 << 20, count=2, shifts=(0, 0), read_next=False, seed=1)  # past the caches, aligned
@example(nbytes=(1 << 20) - 1, count=2, shifts=(32, 1), read_next=False, seed=2)
@example(nbytes=1024, count=1100, shifts=(64, 0), read_next=False, seed=3)
@example(nbytes=241, count=2, shifts=(0, 0), read_next=True, seed=4)
def test_what_is_copied_is_what_was_there(
    way: str, nbytes: int, count: int, shifts: tuple[int, int], read_next: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    room = count * nbytes + 200
    source = random.integers(0, 256, room, dtype=np.uint8)
    order = random.permutation(count)
    starts = [(int(to) * nbytes + shifts[0], of * nbytes + shifts[1]) for of, to in enumerate(order)]
    before = random.integers(0, 256, room, dtype=np.uint8)
    expected = before.copy()
    for to, of in starts:
        expected[to : to + nbytes] = source[of : of + nbytes]
    hashes = [xxhash.xxh3_64_intdigest(source[of : of + nbytes]) for _, of in starts]

    copied, hashed = before.copy(), before.copy()
    copies = [(copied.ctypes.data + to, source.ctypes.data + of) for to, of in starts]
    copying.copy_all(copies, nbytes, read_next=read_next)
    assert np.array_equal(copied, expected)
    copies = [(hashed.ctypes.data + to, source.ctypes.data + of) for to, of in starts]
    assert copying.copy_and_hash(copies, nbytes) == hashes
    assert np.array_equal(hashed, expected)
    assert copying.hash_all([of for _, of in copies], nbytes) == hashes


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 37),
    columns=st.integers(1, 37),
    item=st.sampled_from([1, 2, 4, 8]),
    to_turned=st.booleans(),
    of_turned=st.booleans(),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    count=st.integers(0, 4),
    seed=st.integers(0, 1 << 30),
)
@example(
    rows=32, columns=64, item=4, to_turned=False, of_turned=True, padding=(0, 0), count=3, seed=1
)  # K of vLLM on a CPU
@example(rows=32, columns=64, item=2, to_turned=True, of_turned=False, padding=(0, 1), count=3, seed=2)
@example(
    rows=500, columns=8, item=2, to_turned=False, of_turned=False, padding=(1, 2), count=140, seed=3
)  # rows that are shorter than a line of the cache, past the caches
def test_matrices_are_the_same_in_both_places(
    way: str,
    rows: int,
    columns: int,
    item: int,
    *,
    to_turned: bool,
    of_turned: bool,
    padding: tuple[int, int],
    count: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)

    def memory(turned: bool, padding: int) -> np.ndarray:
        sides = (columns, rows + padding) if turned else (rows, columns + padding)
        return random.integers(0, 256, (count, *sides, item), np.uint8).view(f"V{item}")[..., 0]

    def matrices(memory: np.ndarray, turned: bool) -> np.ndarray:
        return memory[..., :rows].transpose(0, 2, 1) if turned else memory[..., :columns]

    target, source = memory(to_turned, padding[0]), memory(of_turned, padding[1])
    to, of = matrices(target, to_turned), matrices(source, of_turned)
    expected = target.copy()
    matrices(expected, to_turned)[...] = of
    pairs = [(a.ctypes.data, b.ctypes.data) for a, b in zip(to, of, strict=True)]
    matrix = copying.Matrix(rows, columns, item, to=to.strides[1:], of=of.strides[1:])
    copying.copy_matrices(np.array(pairs, np.uint64).reshape(count, 2), matrix)
    assert target.tobytes() == expected.tobytes()  # and nothing around them has changed


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(
        st.one_of(st.integers(1, 3000), st.sampled_from([64, 1024, 4096])), min_size=1, max_size=9
    ),
    count=st.integers(0, 6),
    shift=st.integers(0, 70),
    seed=st.integers(0, 1 << 30),
)
@example(sizes=[1 << 19, 1 << 19], count=3, shift=32, seed=1)  # past the caches, aligned
@example(sizes=[(1 << 19) - 7, (1 << 19) + 100, 1], count=2, shift=64, seed=2)
@example(sizes=[1024, 1024], count=700, shift=0, seed=3)
def test_runs_become_pages_and_pages_runs(
    way: str, sizes: list[int], count: int, shift: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    nbytes = sum(sizes)
    source = random.integers(0, 256, count * nbytes + 1, dtype=np.uint8)
    starts = [source.ctypes.data + at for at in np.cumsum([0, *sizes * count])[:-1].tolist()]
    order = random.permutation(len(starts)).tolist()  # a page's runs lie anywhere
    order = sorted(order, key=lambda at: at % len(sizes))  # but are of its sizes
    runs = [[starts[order[run * count + page]] for run in range(len(sizes))] for page in range(count)]
    expected = [
        b"".join(
            source[run - source.ctypes.data : run - source.ctypes.data + size].tobytes()
            for run, size in zip(page, sizes, strict=True)
        )
        for page in runs
    ]
    room = np.zeros(count * nbytes + 200, np.uint8)
    pages = [room.ctypes.data + shift + at * nbytes for at in range(count)]
    hashes = copying.gather_and_hash(zip(pages, runs, strict=True), sizes)
    assert hashes == [xxhash.xxh3_64_intdigest(page) for page in expected]
    assert room[shift : shift + count * nbytes].tobytes() == b"".join(expected)
    before = source.copy()
    source[: count * nbytes] = 0
    copying.scatter(list(zip(pages, runs, strict=True)), sizes)
    assert np.array_equal(source, before)


def test_every_length_near_a_boundary_has_the_checksum_of_its_specification(way: str) -> None:
    data = np.random.default_rng(5).integers(0, 256, 1 << 18, dtype=np.uint8)
    lengths = {
        max(edge + nearby, 1) for edge in (0, 240, 1024, 2048, 16384, 65536) for nearby in range(-70, 71)
    }
    for nbytes in sorted(lengths):
        assert copying.hash_all([data.ctypes.data + 3], nbytes) == [
            xxhash.xxh3_64_intdigest(data[3 : 3 + nbytes])
        ], nbytes


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.integers(1, 1100), count=st.integers(0, 200), seed=st.integers(0, 1 << 30))
@example(tokens=56, count=40, seed=1)  # 240 bytes with the key before it: as long as the short ones get
@example(tokens=57, count=40, seed=1)
@example(tokens=1024, count=40, seed=1)
@example(tokens=1025, count=40, seed=1)
def test_the_keys_of_a_prompt_are_the_same_each_way(way: str, tokens: int, count: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(tokens * TOKEN_BYTES * count + seed % 100)
    parent = expected = xxhash.xxh3_128_digest(b"before")
    keys = []
    for start in range(0, count * tokens * TOKEN_BYTES, tokens * TOKEN_BYTES):
        expected = xxhash.xxh3_128_digest(expected + data[start : start + tokens * TOKEN_BYTES])
        keys.append(expected)
    found = chunk_keys(parent, data, tokens * TOKEN_BYTES)
    assert found[:count] == keys


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    other = tmp_path / "_pages.so"
    assert native.load(other) is None
    other.write_bytes(b"not a library")
    assert native.load(other) is None
    if COMPILER is not None:
        source = tmp_path / "other.c"
        source.write_text("int tierstore_interface(void) { return 1; }")
        subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(other), str(source)], check=True)
        assert native.load(other) is None


@needs_compiler
@pytest.mark.parametrize(("compiler", "built"), [("cc", True), ("false", False), ("no-such-compiler", False)])
def test_it_can_be_installed_with_a_compiler_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, built: bool
) -> None:
    tree = tmp_path / "tree"
    folders = ("tierstore", "connectors", "engine", "tools")
    for name in folders:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    if built:  # code for this processor takes longer to compile
        quick = tmp_path / "cc"
        quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O1 -DPORTABLE\n')
        quick.chmod(0o755)
        compiler = str(quick)
    monkeypatch.setenv("CC", compiler)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "-w", str(tmp_path), str(tree)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") != built
    with zipfile.ZipFile(wheel) as archive:
        for name in ("pages", "codec"):
            assert (f"tierstore/native/_{name}.so" in archive.namelist()) == built
            assert f"tierstore/native/{name}.c" in archive.namelist()
