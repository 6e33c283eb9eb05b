"""Pages come back bit for bit from a codec. No bytes make a decoder touch anything but the page."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tierstore import codec, native
from tierstore.codec import Codec
from tierstore.errors import UsageError
from tierstore.spec import KVSpec

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
EACH = [HealthCheck.function_scoped_fixture]

SPEC = KVSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16")
LOSSLESS = codec.Lossless()


def layout(dtype: str) -> str:
    return KVSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype=dtype).describe()


def encoded(of: Codec, page: bytes, layout: str = "") -> bytes | None:
    room = memoryview(bytearray(of.bound(len(page))))
    size = of.encode(memoryview(page), room, layout)
    return bytes(room[:size]) if size else None


def decoded(of: Codec, data: bytes, nbytes: int) -> bytes | None:
    page = memoryview(bytearray(nbytes))
    return bytes(page) if of.decode(memoryview(data), page) else None


def library(folder: Path, *flags: str) -> ctypes.CDLL:
    built = folder / "_codec.so"
    source = native.CODEC_FILE.with_name("codec.c")
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(built), str(source)], check=True)
    loaded = native.load_codec(built)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | None:
    """As processors without AVX2 have it."""
    return library(tmp_path_factory.mktemp("native"), "-DPORTABLE") if COMPILER is not None else None


@needs_compiler
def test_the_compiled_part_is_there() -> None:
    assert native.CODEC is not None


@pytest.fixture(params=["compiled", "portable"])
def compiled(
    request: pytest.FixtureRequest, portable: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if COMPILER is None:
        pytest.skip("no C compiler")
    if request.param == "portable":
        monkeypatch.setattr(native, "CODEC", portable)


# Numbers as they may be in a page: of like size, or anything (NaNs with payloads, denormals, infinities).
_SPECIAL = {
    "bfloat16": (np.uint16, [0x7FC1, 0xFF81, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x7FFF]),
    "float16": (np.uint16, [0x7E01, 0xFC01, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x0000, 0x8000, 0x7BFF]),
    "float32": (np.uint32, [0x7FC00001, 0xFF800001, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000]),
}


def numbers(dtype: str, count: int, spread: float, special: int, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    values = random.standard_normal(count) * np.exp2(random.uniform(-spread, spread, count))
    word, specials = _SPECIAL[dtype]
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            made = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            made = values.astype(dtype).view(word)
    places = random.integers(0, count, special)
    made[places] = random.choice(np.array(specials, word), special)
    return made.tobytes()


PAGES = st.builds(
    lambda dtype, count, spread, special, seed, cut: numbers(dtype, count, spread, special, seed)[cut:],
    st.sampled_from(sorted(_SPECIAL)),
    st.one_of(st.integers(1, 3000), st.sampled_from([256, 4096, 4352, 8192]), st.integers(3000, 40000)),
    st.sampled_from([0.0, 1.0, 8.0, 60.0]),
    st.sampled_from([0, 1, 40, 2000]),
    st.integers(0, 2**32),
    st.sampled_from([0, 0, 0, 1]),
)


@settings(deadline=None, max_examples=150, suppress_health_check=EACH)
@given(
    page=st.one_of(PAGES, st.binary(min_size=1, max_size=5000), PAGES.map(lambda page: page + bytes(9000)))
)
@example(page=bytes(20000))
@example(page=b"\x01" * 8192 + b"\x02")
def test_a_page_comes_back_bit_for_bit(compiled: None, page: bytes) -> None:
    room = memoryview(bytearray(LOSSLESS.bound(len(page))))
    assert native.CODEC is not None
    of = np.frombuffer(page, np.uint8).ctypes.data
    to = np.frombuffer(room, np.uint8).ctypes.data
    size = native.CODEC.tierstore_encode(to, room.nbytes, of, len(page))
    assert 0 < size <= LOSSLESS.bound(len(page))
    data = bytes(room[:size])
    assert decoded(LOSSLESS, data, len(page)) == page
    assert decoded(LOSSLESS, data[:-1], len(page)) is None
    assert decoded(LOSSLESS, data + data[:1], len(page)) is None
    assert encoded(LOSSLESS, page) in (data, None)  # None: not worth it


@settings(deadline=None, max_examples=40, suppress_health_check=EACH)
@given(page=PAGES)
def test_it_is_read_without_the_compiled_part_too(monkeypatch: pytest.MonkeyPatch, page: bytes) -> None:
    if (data := encoded(LOSSLESS, page)) is None:
        return
    with monkeypatch.context() as patch:
        patch.setattr(native, "CODEC", None)
        assert decoded(LOSSLESS, data, len(page)) == page
        assert encoded(LOSSLESS, page) is None  # and not written


@settings(deadline=None, max_examples=60)
@given(page=PAGES, dtype=st.sampled_from([*_SPECIAL, ""]))
def test_zstandard_is_lossless(page: bytes, dtype: str) -> None:
    pytest.importorskip("zstandard")
    zstd = codec.by_name("zstd")
    assert zstd is not None
    data = encoded(zstd, page, layout(dtype) if dtype else "")
    if data is not None:
        assert decoded(zstd, data, len(page)) == page


@pytest.mark.parametrize(
    ("dtype", "bits"), [("bfloat16", 11.4), ("float16", 14.4), ("float32", 27.4)], ids=str
)
def test_numbers_of_like_size_become_smaller(compiled: None, dtype: str, bits: float) -> None:
    page = numbers(dtype, 1 << 16, 0.0, 0, seed=1)
    data = encoded(LOSSLESS, page)
    assert data is not None
    assert len(data) * 8 / (1 << 16) < bits


def test_what_does_not_become_smaller_is_not_encoded(compiled: None) -> None:
    assert encoded(LOSSLESS, np.random.default_rng(1).bytes(100_000)) is None


def test_a_page_of_two_kinds_is_encoded_as_both(compiled: None) -> None:
    halves, words = (numbers(dtype, 1 << 15, 0.0, 0, 1) for dtype in ("bfloat16", "float32"))
    both, one, other = (encoded(LOSSLESS, page) for page in (halves + words, halves, words))
    assert both is not None
    assert one is not None
    assert other is not None
    assert both == one + other


# -- hostile bytes -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(page=PAGES, seed=st.integers(0, 2**32), flips=st.integers(1, 8))
def test_all_ways_agree_on_damaged_bytes(page: bytes, seed: int, flips: int) -> None:
    data = encoded(LOSSLESS, page)
    if data is None:
        return
    random = np.random.default_rng(seed)
    damaged = np.frombuffer(data, np.uint8).copy()
    # Heads decide most: half of the flips are there.
    for place in np.where(random.random(flips) < 0.5, 20, len(damaged)):
        damaged[random.integers(0, min(place, len(damaged)))] ^= random.integers(1, 256)
    kept = bytes(damaged[: len(damaged) - random.integers(0, 3)])
    compiled_page, plain_page = bytearray(len(page)), bytearray(len(page))
    compiled = LOSSLESS.decode(memoryview(kept), memoryview(compiled_page))
    plain = codec._decode_lossless(memoryview(kept), memoryview(plain_page))
    # The compiled decoder finds out later that symbols are missing or left over; the outcome is one.
    assert compiled == plain
    assert not compiled or compiled_page == plain_page


_FUZZ = r"""
#include "codec.c"
#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 88172645463325252ULL;
static uint64_t next(void) { state ^= state << 13; state ^= state >> 7; return state ^= state << 17; }

int main(int argc, char **argv) {
    long turns = atol(argv[argc - 1]), taken = 0;
    for (long turn = 0; turn < turns; turn++) {
        size_t nbytes = 1 + next() % (turn % 4 ? 20000 : 1200), room = nbytes + nbytes / 8192 + 32;
        uint8_t *page = malloc(nbytes), *back = malloc(nbytes), *to = malloc(room);
        int spread = 1 << next() % 8, step = 1 + next() % 4;
        for (size_t at = 0; at < nbytes; at++)
            page[at] = at % step ? next() : 0x3c + next() % spread;
        size_t size = tierstore_encode(to, room, page, nbytes);
        uint8_t *exact = malloc(size);
        memcpy(exact, to, size);
        if (!size || !tierstore_decode(back, nbytes, exact, size) || memcmp(page, back, nbytes))
            return 1;
        for (int flips = next() % 4; flips >= 0; flips--)
            exact[next() % (next() % 2 && size > 20 ? 20 : size)] = next();
        size_t other = next() % 3 ? nbytes : 1 + next() % nbytes, less = next() % 3 ? size : next() % size;
        uint8_t *cut = malloc(less + !less), *target = malloc(other);
        memcpy(cut, exact, less);
        taken += tierstore_decode(target, other, cut, less);
        free(page), free(back), free(to), free(exact), free(cut), free(target);
    }
    printf("%ld\n", taken);
    return 0;
}
"""


@needs_compiler
@pytest.mark.parametrize("flags", [(), ("-DPORTABLE",)], ids=["wide", "portable"])
def test_nothing_is_touched_that_is_not_given(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Under the address sanitizer, which sees any access beyond what was allocated."""
    (tmp_path / "fuzz.c").write_text(_FUZZ)
    source = native.CODEC_FILE.parent
    sanitizers = "-fsanitize=address,undefined"
    command = ["cc", "-O1", "-g", sanitizers, "-fno-sanitize-recover", "-Wall", "-Wextra", *flags]
    built = subprocess.run(
        [*command, f"-I{source}", "-o", str(tmp_path / "fuzz"), str(tmp_path / "fuzz.c")],
        capture_output=True,
        text=True,
    )
    if built.returncode and "asan" in built.stderr:
        pytest.skip("no address sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "fuzz", "5000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        int(done.stdout) > 0
    )  # some damage is in mantissas, which may be anything: the checksum is for that


@pytest.mark.parametrize("name", ["lossless", "zstd"])
@settings(deadline=None, max_examples=80)
@given(data=st.binary(max_size=400), nbytes=st.sampled_from([0, 1, 64, SPEC.page_bytes]))
def test_any_bytes_are_refused_or_a_page(name: str, data: bytes, nbytes: int) -> None:
    if name == "zstd":
        pytest.importorskip("zstandard")
    one = codec.by_name(name)
    assert one is not None
    assert decoded(one, data, nbytes) in (None, bytes(data[1:2] * nbytes))


def test_a_frame_that_claims_to_be_huge_is_not_unpacked() -> None:
    zstandard = pytest.importorskip("zstandard")
    zstd = codec.by_name("zstd")
    assert zstd is not None
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    data = b"\x02" + len(frame).to_bytes(4, "little") + frame + bytes(1024)
    assert decoded(zstd, data, 2048) is None


# -- names ---------------------------------------------------------------------------------------------


def test_names_and_numbers() -> None:
    pytest.importorskip("zstandard")
    assert codec.by_name("none") is None
    for name in ("gzip", *codec.REMOVED):
        with pytest.raises(UsageError, match=rf"no codec '{name}' \(there are: none, lossless, zstd\)"):
            codec.by_name(name)
    numbers = {name: each.number for name in codec.NAMES if (each := codec.by_name(name)) is not None}
    # Records name them: these never change.
    assert numbers == {"lossless": 1, "zstd": 2}
    assert codec.REMOVED == {"fp8": 3, "int8": 4, "int4": 5}
    assert all(codec.by_number(number) is codec.by_name(name) for name, number in numbers.items())
    assert codec.by_number(0) is None
    assert all(codec.by_number(number) is None for number in [*codec.REMOVED.values(), 77])


def test_without_the_compiled_part_zstandard_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zstandard")
    monkeypatch.setattr(native, "CODEC", None)
    standing_in = codec.by_name("lossless")
    assert standing_in is not None
    assert standing_in.name == "zstd"


@pytest.mark.parametrize("name", ["zstd", "lossless"])
def test_without_zstandard_the_error_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec._of_number.cache_clear()
    monkeypatch.setattr(native, "CODEC", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"'tierstore\[codecs\]' \(in a checkout: .*'\.\[codecs\]'\)"):
        codec.by_name(name)
