"""Access the objects below a prefix in a bucket, through obstore. Errors have one line.

Credentials come from the usual places: the environment (``AWS_ACCESS_KEY_ID``), the profile in
``~/.aws/credentials``, a web identity, or the role of the container or instance. No error message contains
credentials: it has the kind of error and S3's error code, but not obstore's text.

Only agents and commands import this module. obstore's calls release the GIL, so several threads can call it
at the same time.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tierstore.cluster.s3_address import S3Address
from tierstore.errors import SharedStoreError, UsageError
from tierstore.extras import install

_WRITE_S = 60.0
_LISTED = 1000  # entries in one answer to a listing; S3 allows no more
_PROFILE_S = 600  # after this time, the file with the profile is read again
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"\b[45]\d\d (?:[A-Z][A-Za-z]+ ?){1,4}")
_UNREADABLE = ("<Code>InvalidRange</Code>", "<Code>InvalidObjectState</Code>")
_INSTANCE = ("/latest/api/token", "/latest/meta-data", "169.254.170.")
# Errors about the name of one object. obstore cannot read a listing that has such a name.
_ODD_NAME = ("EmptySegment", "BadSegment", "InvalidPath")
_ADVICE = {
    "RequestTimeTooSkewed": "set this host's clock",
    "NoSuchBucket": "create the bucket, or correct its name",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID or the profile",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY or the profile",
    "AccessDenied": "allow these credentials to list, read, write and delete below the prefix",
}


class BucketError(SharedStoreError):
    """The bucket does not answer, or refuses a request."""


class NoObjectError(BucketError):
    """The object does not exist, or cannot be read because it is too short or archived."""


class Listed(NamedTuple):
    """An object in a listing: its path below the prefix, its size, and the time at which it was written, in
    the server's seconds since 1970. A changed object has another ``tag``."""

    path: str
    nbytes: int
    written_at: float
    tag: str = ""


class Bucket:
    """The objects below a prefix. A read takes at most ``read_s`` seconds, and is repeated once after an
    error. Thread-safe.

    The constructor raises :class:`UsageError` if obstore is not installed. Every method raises
    :class:`BucketError` if the server does not answer or refuses the request.
    """

    def __init__(self, address: S3Address, read_s: float = 10.0) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import S3Store
        except ImportError as error:
            raise UsageError(f"object storage needs obstore: {install('s3')}") from error
        self._api: Any = obstore
        self._errors: tuple[type[Exception], ...] = (BaseError, OSError, ValueError)
        self._exists: type[Exception] = AlreadyExistsError
        self.address = address
        self.read_s = read_s
        endpoint = address.endpoint or next(
            filter(None, map(os.environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"))), ""
        )
        given = {"endpoint": address.endpoint, "region": address.region}
        config: Any = {name: value for name, value in given.items() if value}
        config["virtual_hosted_style_request"] = not address.path_style
        if address.endpoint and "AWS_ENDPOINT_URL_S3" in os.environ:
            # The variable would have precedence over ``endpoint``.
            config["aws_endpoint_url_s3"] = address.endpoint

        def opened(request_s: float, retries: int) -> Any:
            return S3Store(
                address.bucket,
                prefix=address.prefix or None,
                config=config,
                client_options={
                    "timeout": timedelta(seconds=request_s),
                    "connect_timeout": timedelta(seconds=2),
                    "allow_http": endpoint.startswith("http://"),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=request_s),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=2),
                        "base": 2,
                    },
                },
                credential_provider=_profile(os.environ),
            )

        with self._reporting():
            self._reading = opened(read_s, 1)
            self._writing = opened(_WRITE_S, 3)

    def list(self, folder: str) -> Iterator[Listed]:
        """Yield the objects of a folder and of all folders below it, as they arrive. If obstore cannot read
        one of their names, such as ``a//b``, list the folder again without the folders below it. Some objects
        are then yielded twice."""
        with self._reporting():
            try:
                for part in self._api.list(self._reading, folder, chunk_size=_LISTED):
                    yield from map(_listed, part)
            except self._errors as error:
                if not any(odd in str(error) for odd in _ODD_NAME):
                    raise
                yield from map(_listed, self._api.list_with_delimiter(self._reading, folder)["objects"])

    def read(self, path: str, start: int, length: int) -> memoryview:
        """Return a range of an object; shorter if the object ends before. Raise :class:`NoObjectError` if the
        object or the range does not exist."""
        with self._reporting():
            return memoryview(self._api.get_range(self._reading, path, start=start, length=length))

    def write(self, path: str, data: bytes) -> None:
        """Write an object as a whole or not at all."""
        with self._reporting():
            # Not as a multipart upload: the parts of an interrupted upload would stay in the bucket.
            self._api.put(self._writing, path, data, use_multipart=False)

    def create(self, path: str, data: bytes) -> None:
        """Write an object unless its path exists. Raise :class:`BucketError` for a bucket that keeps old
        versions of its objects."""
        with self._reporting():
            try:
                put = self._api.put(self._writing, path, data, mode="create", use_multipart=False)
            except self._exists:
                return
        if put["version"] is not None:
            raise BucketError(
                f"bucket {self.address.bucket} keeps old versions, so a forget would erase no key: "
                "give a bucket without versions"
            )

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects. Ignore objects that do not exist."""
        with self._reporting():
            self._api.delete(self._writing, list(paths))

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise BucketError(self._described("NoSuchBucket")) from None
            raise NoObjectError(f"bucket {self.address.bucket} has no such object") from None
        except self._errors as error:
            text = f"{type(error).__name__} {error}"
            if any(code in text for code in _UNREADABLE):
                raise NoObjectError(self._described(text)) from None
            raise BucketError(self._described(text)) from None

    def _described(self, text: str) -> str:
        """Describe an error in one line. The line contains only known parts of ``text``, because ``text`` may
        contain credentials."""
        where = f"bucket {self.address.bucket}"
        if any(part in text for part in _ODD_NAME):
            return f"{where} has an object whose name this program cannot read, such as a//b: remove it"
        if any(part in text for part in _INSTANCE):
            return (
                f"{where}: this host has no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "a profile in ~/.aws/credentials, or a role of the instance"
            )
        found = _CODE.search(text)
        code = found[1] if found else next((each for each in _ADVICE if each in text), "")
        if code in _ADVICE:
            return f"{where}: {code}: {_ADVICE[code]}"
        status = _STATUS.search(text)
        if code or status:
            return f"{where}: the server answers {code or (status[0].strip() if status else '')}"
        if "PermissionDenied" in text or "Unauthenticated" in text:
            return f"{where}: the server refuses this host's credentials"
        return f"{where} does not answer"


def _listed(entry: Mapping[str, Any]) -> Listed:
    return Listed(entry["path"], entry["size"], entry["last_modified"].timestamp(), entry["e_tag"] or "")


def _profile(environment: Mapping[str, str]) -> Any:
    """Return a provider of the credentials in a profile, because obstore does not read profiles. Return None
    if there is no profile, or if the environment has credentials or a web identity, which have precedence."""
    if environment.get("AWS_ACCESS_KEY_ID") or environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    name = environment.get("AWS_PROFILE", "default")
    file = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()

    def read() -> dict[str, Any] | None:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file)
            section = parser[name]
            return {
                "access_key_id": section["aws_access_key_id"],
                "secret_access_key": section["aws_secret_access_key"],
                "token": section.get("aws_session_token"),
                "expires_at": datetime.now(timezone.utc) + timedelta(seconds=_PROFILE_S),
            }
        except (configparser.Error, KeyError, OSError, UnicodeDecodeError):
            return None

    if read() is None:
        if "AWS_PROFILE" in environment:
            raise UsageError(
                f"{file} has no profile {name!r} with aws_access_key_id and aws_secret_access_key"
            )
        return None

    def provide() -> dict[str, Any]:
        found = read()
        if found is None:
            raise ValueError("the profile is gone")
        return found

    return provide
