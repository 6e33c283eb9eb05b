"""The dashboard's documents and access rules: turns HTTP requests into answers. It knows no sockets.

Access rules:

* At a loopback address, every user of this machine has access, unless the dashboard has a token. A request
whose
  ``Host`` is another machine is refused, because any web page can make its own host name resolve to 127.0.0.1
  and could then read the answers.
* At any other address, access requires a token. The browser sends the token once, and then a cookie that is
  derived from the token and cannot be used for anything else.
* A request that a page of another site has caused (``Origin``, ``Sec-Fetch-Site``) is refused, so that such
  pages cannot use up the limited number of viewers.

Samples contain names chosen by clients. The dashboard shows them as text only, and
``Content-Security-Policy`` allows only its own two scripts.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import http.cookies
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.wire.local_address import foreign_host, is_loopback

PAGE = "/dashboard/"
MOST_BODY_BYTES = 1024

_MIN_TOKEN = 16
_COOKIE_S = 30 * 86400
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer, the form for the token would send Origin: null
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TEXT = "text/plain; charset=utf-8"
_EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class WebRequest:
    """An HTTP request. ``target`` is the path and query as sent. The names of ``headers`` are in lower
    case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    @property
    def token(self) -> str:
        """The token in the form or in the query; empty if the request has none."""
        text = self.body.decode("utf-8", "replace") if self.method == "POST" else self.query
        return urllib.parse.parse_qs(text).get("token", [""])[0]


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """An HTTP answer. ``follows``: the events of the feed follow the headers."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    follows: bool = False


class Site:
    """The dashboard of a server at the address ``host``. If ``token`` is None, every request is admitted at a
    loopback address, and none at any other address. The refusal says ``how`` to set a token. ``title`` is
    shown above the form for the token."""

    def __init__(self, host: str, token: str | None, *, title: str, how: str) -> None:
        self._host = host
        self._loopback = is_loopback(host)
        self._token = token
        self._title = title
        self._how = how
        # The cookie is not the token itself, because a browser sends cookies to every port of a host, and the
        # token may permit more than the dashboard.
        secret = hmac.digest((token or "").encode(), b"tierstore: who may look at the page", "sha256").hex()
        self._cookie = f"tierstore-{hashlib.sha256(secret.encode()).hexdigest()[:8]}"
        self._secret = secret

    def refusal(self, request: WebRequest) -> WebAnswer | None:
        """Return the refusal of a request whose ``Host`` is another host; None for other requests."""
        name = foreign_host(self._host, request.headers.get("host", ""))
        return None if name is None else _text(421, f"this is not {name}: use localhost or 127.0.0.1")

    def strange(self, request: WebRequest) -> WebAnswer | None:
        """Return the refusal of a request whose ``Host`` is another host or that a page of another site has
        caused; None for other requests."""
        if (refusal := self.refusal(request)) is not None:
            return refusal
        return None if _same_site(request) else _text(403, "requests from other sites are refused")

    def answer(self, request: WebRequest) -> WebAnswer | None:
        """Return the answer to a request; None if its path does not belong to the dashboard."""
        path = request.path
        if path not in ("/", PAGE.rstrip("/")) and not path.startswith(PAGE):
            return None
        if (refusal := self.strange(request)) is not None:
            return refusal
        if path in ("/", PAGE.rstrip("/")):
            query = f"?{request.query}" if request.query else ""
            return WebAnswer(307, {"Location": f"{PAGE.strip('/')}/{query}", **_HEADERS})
        if self._token is None and not self._loopback:
            return _text(403, f"at this address the dashboard needs a token: {self._how}")
        return self._of_page(request, path.removeprefix(PAGE))

    def _of_page(self, request: WebRequest, name: str) -> WebAnswer:
        if not name and (request.token or request.method == "POST"):
            return self._let_in(request)
        if request.method != "GET":
            return _text(405, "GET only")
        allowed = self._allowed(request)
        if name == "feed":
            if not allowed:
                return _text(401, "a token is required", {"WWW-Authenticate": "Bearer"})
            return WebAnswer(200, {"Content-Type": _EVENTS, **_HEADERS}, follows=True)
        if not name:
            if not allowed:
                return self._ask("")
            return WebAnswer(200, {"Content-Type": _KINDS[".html"], **_HEADERS}, _documents()["page.html"])
        body = _documents().get(name)
        if body is None or not name.endswith((".js", ".css", ".svg")):  # these are served without a token
            return _text(404, "no such file")
        return WebAnswer(200, {"Content-Type": _KINDS[Path(name).suffix], **_HEADERS}, body)

    def _ask(self, why: str) -> WebAnswer:
        headers = {"Content-Type": _KINDS[".html"], "WWW-Authenticate": "Bearer", **_HEADERS}
        form = _documents()["token.html"].replace(b"{title}", self._title.encode())
        return WebAnswer(401, headers, form.replace(b"{why}", why.encode()))

    def _let_in(self, request: WebRequest) -> WebAnswer:
        if self._token is None:
            return WebAnswer(303, {"Location": ".", **_HEADERS})
        if not _equal(request.token, self._token):
            return self._ask("The token is wrong.")
        flags = f"Path={PAGE}; Max-Age={_COOKIE_S}; HttpOnly; SameSite=Lax"
        cookie = f"{self._cookie}={self._secret}; {flags}"
        return WebAnswer(303, {"Location": ".", "Set-Cookie": cookie, **_HEADERS})

    def _allowed(self, request: WebRequest) -> bool:
        if self._token is None:
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(token.strip(), self._token):
            return True
        try:
            cookies = http.cookies.SimpleCookie(request.headers.get("cookie", ""))
        except http.cookies.CookieError:
            return False
        cookie = cookies.get(self._cookie)
        return cookie is not None and _equal(cookie.value, self._secret)


def read_token(file: Path | None) -> str | None:
    """Read the dashboard's token. Raise :class:`UsageError` if the file cannot be read or the token is too
    short."""
    if file is None:
        return None
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the dashboard's token: {error}") from error
    if len(token) < _MIN_TOKEN:
        raise UsageError(
            f"{file}: the dashboard's token must have at least {_MIN_TOKEN} characters, got {len(token)}"
        )
    return token


def _same_site(request: WebRequest) -> bool:
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        # From another site, a user may follow a link to the dashboard. Anything else is refused.
        return request.headers.get("sec-fetch-mode") == "navigate" and request.method == "GET"
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


def _equal(given: str, right: str) -> bool:
    """Compare two strings in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(), right.encode())


def _text(status: int, text: str, headers: Mapping[str, str] | None = None) -> WebAnswer:
    return WebAnswer(status, {"Content-Type": _TEXT, **_HEADERS, **(headers or {})}, f"{text}\n".encode())


@functools.cache
def _documents() -> dict[str, bytes]:
    """Return the files in ``assets``, by name."""
    folder = resources.files("tierstore.dashboard") / "assets"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
