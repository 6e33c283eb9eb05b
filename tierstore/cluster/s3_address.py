"""The address of a prefix in a bucket, ``s3://BUCKET/PREFIX?endpoint=URL``. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, urlsplit

from tierstore.errors import UsageError

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,62}")
_REFRESH_S = (0.1, 86400.0)
_DEFAULT_REFRESH_S = 30.0


@dataclass(frozen=True, slots=True)
class S3Address:
    """A prefix in a bucket. The environment (``AWS_…``) replaces a missing ``endpoint`` or ``region``. With
    ``path_style``, the bucket's name is the first part of the URL's path instead of its host name. Agents
    list the bucket every ``refresh_s`` seconds."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    path_style: bool = True
    refresh_s: float = _DEFAULT_REFRESH_S

    @classmethod
    def parse(cls, url: str) -> S3Address:
        """Parse an address. Raise :class:`UsageError` if it is malformed or contains credentials. The error
        message repeats no part of the address that may be secret.

        >>> S3Address.parse("s3://models/kv?endpoint=http://10.0.0.1:8333").prefix
        'kv'
        """
        place = _split(url)
        if place.scheme != "s3" or not _BUCKET.fullmatch(place.netloc):
            raise UsageError(
                "an address in S3 must be s3://BUCKET/PREFIX, with a bucket of 3 to 63 characters"
            )
        given = dict(parse_qsl(place.query, keep_blank_values=True))
        unknown = given.keys() - {"endpoint", "region", "style", "refresh_s"}
        if unknown or place.fragment:
            name = _option_name(min(unknown, default="#"))
            raise UsageError(
                f"an address in S3 has no option {name}: give endpoint, region, style or refresh_s"
            )
        style = given.get("style", "path")
        if style not in ("path", "virtual"):
            raise UsageError("style of an address in S3 must be path or virtual")
        endpoint = given.get("endpoint", "")
        if endpoint and _split(endpoint).scheme not in ("http", "https"):
            raise UsageError("endpoint of an address in S3 must be http://HOST:PORT or https://HOST:PORT")
        return cls(
            place.netloc,
            place.path.strip("/"),
            endpoint,
            given.get("region", ""),
            style == "path",
            _seconds(given),
        )


def _option_name(name: str) -> str:
    """Return the name of an option for an error message. Replace a name that is not a plain word, because it
    may be a secret."""
    return repr(name) if re.fullmatch(r"[a-z_]{1,20}|#", name) else "of that name"


def _split(url: str) -> SplitResult:
    """Split an address. Raise :class:`UsageError` if it contains credentials."""
    try:
        place = urlsplit(url)
    except ValueError:
        raise UsageError("an address in S3 is malformed: it must be s3://BUCKET/PREFIX") from None
    if "@" in place.netloc:
        raise UsageError(
            "an address in S3 must have no credentials: put them into AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or into a profile"
        )
    return place


def _seconds(given: Mapping[str, str]) -> float:
    try:
        seconds = float(given.get("refresh_s", _DEFAULT_REFRESH_S))
    except ValueError:
        seconds = math.nan
    if not _REFRESH_S[0] <= seconds <= _REFRESH_S[1]:
        raise UsageError("refresh_s of an address in S3 must lie between 0.1 and 86400 seconds")
    return seconds
