"""Digests of the complete contents of files: weights, adapters, and other files of a model.

A file's name, size and times do not identify its contents: container images set one time for all files, and
two fine-tunes of one model have equal sizes. So every byte is hashed, at about 1 GB/s per thread.

A cache file stores digests, so that only the first start of an engine hashes. A file's entry is found by the
file's device, inode, size, modification time, change time (``st_ctime``, which only the kernel sets), and a
sample of its bytes. The cache file is used only if no other user could have written it. Without a usable
cache file, each start of an engine hashes all files. If several processes need the same files, one process
hashes and the other processes wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tierstore.errors import UsageError
from tierstore_connectors.common.facts import WEIGHTS

_SAMPLES, _SAMPLE_BYTES = 64, 4096  # per file, evenly spaced
_SAMPLED_FROM = 1 << 20
_PART_BYTES = 64 << 20  # a thread hashes a part of this size at a time
_BUFFER_BYTES = 1 << 20
_MOST_THREADS = 8
_MOST_ENTRIES, _MOST_CACHE_BYTES = 8192, 4 << 20
_SETTLED_NS = 2_000_000_000  # a second change within one tick of a file system's clock leaves the times equal
_WAIT_S = 600.0  # how long to wait for another process that hashes the same files
_RETRIES = 3
# Files in a model's folder that engines do not use. Hidden files are ignored as well.
_DOCUMENTS = frozenset({".md", ".rst", ".pdf", ".png", ".jpg", ".jpeg", ".svg", ".gif"})
_PAPERS = ("license", "notice", "readme")


@dataclass(frozen=True, slots=True)
class Contents:
    """The digest of some files. Of their ``nbytes`` bytes, ``hashed_bytes`` were hashed in this call, which
    took ``seconds``; the digests of the other files come from the cache file or from samples."""

    digest: str
    files: int
    nbytes: int
    hashed_bytes: int
    seconds: float

    def __str__(self) -> str:
        gb, hashed = self.nbytes / 1e9, self.hashed_bytes / 1e9
        return f"{self.files} files ({gb:.2f} GB, {hashed:.2f} GB of them hashed) in {self.seconds:.2f} s"


def contents(files: Mapping[str, Path], *, remembered: Path | None, sampled: bool = False) -> Contents:
    """Return the digest of ``files``: of their names (the keys) and their complete contents.

    ``remembered`` is the cache file, usually :func:`default_cache`; None hashes every time. With ``sampled``,
    files of 1 MiB and more count by size, modification time and a sample only. Raise :class:`OSError` for a
    file that cannot be read, or that changes while it is read.

    Any thread and any process may call this function, which blocks: for weights, call it on a separate
    thread.
    """
    began = time.monotonic()
    hashes = _Hashes(remembered)
    ordered = sorted(files.items())
    found = [_Digest(path, sampled=sampled) for _, path in ordered]
    hashes.fill(found)
    whole = hashlib.sha256()
    for (name, _), each in zip(ordered, found, strict=True):
        whole.update(msgspec.json.encode([name, each.size, each.value]))
    return Contents(
        whole.hexdigest()[:32],
        len(found),
        sum(each.size for each in found),
        hashes.hashed_bytes,
        time.monotonic() - began,
    )


def model_files(folder: Path) -> dict[str, Path]:
    """Return every file in a model's folder and its subfolders by relative name, without hidden files and
    documents (README, LICENSE, pictures). Raise :class:`OSError` if a folder cannot be read."""
    found: dict[str, Path] = {}
    seen: set[tuple[int, int]] = set()

    def visit(place: Path, name: str) -> None:
        status = place.stat()
        if (status.st_dev, status.st_ino) in seen:
            return  # a cyclic link
        seen.add((status.st_dev, status.st_ino))
        for each in sorted(place.iterdir()):
            if each.name.startswith("."):
                continue
            if each.is_dir():
                visit(each, f"{name}{each.name}/")
            elif each.is_file() and not _is_document(each):
                found[f"{name}{each.name}"] = each

    visit(folder, "")
    return found


def contents_of(place: Path, *, sampled: bool = False, log: logging.Logger) -> str:
    """Return the digest of a file, or of all files in a folder. The path of ``place`` does not count. Raise
    :class:`UsageError` if a file cannot be read."""
    try:
        found = contents(files_of(place), remembered=default_cache(), sampled=sampled)
    except OSError as error:
        raise UsageError(f"cannot read {place}, which is part of the pages' identity: {error}") from error
    if found.hashed_bytes:
        log.info("tierstore: %s: %s", place, found)
    return found.digest


def files_of(place: Path) -> dict[str, Path]:
    """Return the file ``place``, or every file of the model's folder ``place``, by relative name. Raise
    :class:`UsageError` if a folder cannot be read."""
    try:
        return model_files(place) if place.is_dir() else {"": place}
    except OSError as error:
        raise UsageError(f"cannot read {place}, which is part of the pages' identity: {error}") from error


def has_weights(folder: Path) -> bool:
    """Return whether ``folder`` is a folder with weight files."""
    return folder.is_dir() and any(Path(name).suffix in WEIGHTS for name in files_of(folder))


def with_contents(value: object, *, sampled: bool = False, log: logging.Logger) -> object:
    """Return an argument's value as JSON in a fixed order, with the digest of a file's or folder's contents
    in place of its path. Raise :class:`UsageError` for a file that cannot be read."""
    if isinstance(value, Mapping):
        return [
            [str(key), with_contents(each, sampled=sampled, log=log)]
            for key, each in sorted(value.items(), key=str)
        ]
    if isinstance(value, (set, frozenset)):
        return sorted(str(each) for each in value)
    if isinstance(value, (list, tuple)):
        return [with_contents(each, sampled=sampled, log=log) for each in value]
    if isinstance(value, (bool, int, float, type(None))):
        return value
    text = str(value)
    return {"contents": contents_of(Path(text), sampled=sampled, log=log)} if _is_there(text) else text


def _is_there(text: str) -> bool:
    """Return whether ``text`` is the path of an existing file or folder."""
    try:
        place = Path(text)
        return bool(text) and (place.is_file() or place.is_dir())
    except (OSError, ValueError):  # the name is too long or contains a zero byte
        return False


def default_cache() -> Path | None:
    """Return the path of the cache file: ``$XDG_CACHE_HOME/tierstore/contents.json``, by default in
    ``~/.cache``. Return None if this user has no home folder."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "tierstore" / "contents.json"


def _is_document(file: Path) -> bool:
    return file.suffix.lower() in _DOCUMENTS or file.stem.lower().startswith(_PAPERS)


class _Digest:
    """One file. ``value`` is its digest, "" until the digest is known, and ``key`` its key in the cache
    file."""

    def __init__(self, path: Path, *, sampled: bool) -> None:
        self.path = path
        self.value = ""
        self.look()
        if sampled and self.size >= _SAMPLED_FROM:
            self.value = f"sample-{self.times[0]}-{self.sample}"

    def look(self) -> None:
        """Read the file's current status and sample."""
        with _opened(self.path) as fd:
            status = os.fstat(fd)
            self.size = status.st_size
            self.times = (status.st_mtime_ns, status.st_ctime_ns)
            self.sample = _sample(fd, self.size)
            self.key = msgspec.json.encode(
                [status.st_dev, status.st_ino, self.size, *self.times, self.sample]
            ).decode()
            # The files of a mounted file system image have the change times of the image, and another image
            # mounted at the same path may have the same times. The digests of files in images are not stored.
            image = bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY) and self.times[0] == self.times[1]
        self.lasting = not image and time.time_ns() - max(self.times) > _SETTLED_NS


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def _sample(fd: int, size: int) -> str:
    digest = hashlib.sha256()
    last = max(size - _SAMPLE_BYTES, 0)
    for at in sorted({last * at // (_SAMPLES - 1) for at in range(_SAMPLES)}):
        digest.update(os.pread(fd, _SAMPLE_BYTES, at))
    return digest.hexdigest()


def _hash_part(path: Path, start: int) -> bytes:
    """Return the digest of the part of a file that begins at ``start`` (``_PART_BYTES`` or less)."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with _opened(path) as fd:
        at, stop = start, start + _PART_BYTES
        while at < stop:
            count = os.preadv(fd, [buffer[: stop - at]], at)
            if not count:
                break
            digest.update(buffer[:count])
            at += count
    return digest.digest()


class _Hashes:
    """The digests of files, read from a cache file or computed."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.hashed_bytes = 0

    def fill(self, files: Sequence[_Digest]) -> None:
        """Set the digests of ``files``."""
        unknown = [each for each in files if not each.value]
        if not unknown or not (missing := self._find(unknown)):
            return
        with _one_at_a_time(self._file, missing):
            missing = self._find(missing)
            self._hash(missing)
            self._remember([each for each in missing if each.lasting])

    def _find(self, files: Sequence[_Digest]) -> list[_Digest]:
        """Set the digests that the cache file has. Return the files without a digest."""
        known = _read(self._file)
        for each in files:
            each.value = known.get(each.key, "")
        return [each for each in files if not each.value]

    def _hash(self, files: Sequence[_Digest]) -> None:
        threads = min(max(len(os.sched_getaffinity(0)) // 2, 1), _MOST_THREADS)
        with ThreadPoolExecutor(threads, thread_name_prefix="tierstore-hash") as pool:
            for _ in range(_RETRIES):
                parts = [
                    [
                        pool.submit(_hash_part, each.path, at)
                        for at in range(0, max(each.size, 1), _PART_BYTES)
                    ]
                    for each in files
                ]
                changed = []
                for each, several in zip(files, parts, strict=True):
                    each.value = hashlib.sha256(b"".join(part.result() for part in several)).hexdigest()
                    self.hashed_bytes += each.size
                    before, lasting = each.key, each.lasting
                    each.look()
                    if each.key != before:
                        changed.append(each)
                    each.lasting = lasting and each.key == before
                if not changed:
                    return
                files = changed
        raise OSError(f"{files[0].path} changes while it is read")

    def _remember(self, files: Sequence[_Digest]) -> None:
        """Add digests to the cache file, and keep the digests that other processes have added. If the cache
        file cannot be written, the next start hashes again."""
        if self._file is None or not files:
            return
        known = _read(self._file)
        for each in files:
            known.pop(each.key, None)  # moves the digest to the end: old digests are dropped first
            known[each.key] = each.value
        kept = dict(list(known.items())[-_MOST_ENTRIES:])
        with suppress(OSError):
            _replace(self._file, msgspec.json.encode({"version": 1, "digests": kept}))


class _Cache(msgspec.Struct):
    version: int
    digests: dict[str, str]


def _read(file: Path | None) -> dict[str, str]:
    """Return the cache file's digests, or {} if the file is missing, damaged, or writable by other users."""
    if file is None:
        return {}
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        status = os.fstat(fd)
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not private or not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_CACHE_BYTES:
            return {}
        cache = msgspec.json.decode(os.read(fd, _MOST_CACHE_BYTES), type=_Cache)
    except (OSError, msgspec.DecodeError):
        return {}
    finally:
        os.close(fd)
    return cache.digests if cache.version == 1 else {}


def _replace(file: Path, data: bytes) -> None:
    """Replace ``file`` atomically. Only this user can read the new file."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, scratch = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with open(fd, "wb") as opened:
            opened.write(data)
        os.replace(scratch, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise


@contextmanager
def _one_at_a_time(file: Path | None, missing: Sequence[_Digest]) -> Iterator[None]:
    """Wait while another process hashes the same files. The lock only saves time: if it cannot be taken, both
    processes hash."""
    keys = "".join(each.key for each in missing).encode()
    place = int.from_bytes(hashlib.sha256(keys).digest()[:4], "big")
    try:
        if file is None:
            raise FileNotFoundError
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(file.with_suffix(".lock"), flags, 0o600)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break  # file system without locks
        yield
    finally:
        os.close(fd)
