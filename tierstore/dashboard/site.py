"""The page's documents and who may have them: requests in, answers out, no sockets.

Who may look:

* At a loopback address everybody on this machine may, unless there is a token. Only requests that name this
  machine are answered (``Host``): a web page elsewhere may have its own name point to 127.0.0.1, and read
  what it gets.
* At any other address the page asks for the token. It goes to the server once; the browser then keeps a
  cookie that is made from it, and is of no use for anything else.
* A request that says it comes from another site (``Origin``, ``Sec-Fetch-Site``) is refused, so that a web
  page elsewhere cannot take the places of those who look.

What is shown contains names that others chose. The page writes text only, and ``Content-Security-Policy``
lets it run its own two scripts and nothing else.
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
    "Referrer-Policy": "same-origin",  # no-referrer would have forms say that their origin is null
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TEXT = "text/plain; charset=utf-8"
_EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class WebRequest:
    """``target`` is path and query as they were sent; names of ``headers`` are in lower case."""

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
        """The one that was typed in, or is in the address; empty without."""
        text = self.body.decode("utf-8", "replace") if self.method == "POST" else self.query
        return urllib.parse.parse_qs(text).get("token", [""])[0]


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """``follows``: after the headers comes the feed, for as long as both sides like."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    follows: bool = False


class Site:
    """What a server at ``host`` shows to whom. ``token`` None: nobody off loopback, where ``how`` is said
    instead.

    ``title`` is what a person who is asked for the token reads.
    """

    def __init__(self, host: str, token: str | None, *, title: str, how: str) -> None:
        self._host = host
        self._loopback = is_loopback(host)
        self._token = token
        self._title = title
        self._how = how
        # Not the token: cookies go to every port of a host, and the token may open more than this page.
        secret = hmac.digest((token or "").encode(), b"tierstore: who may look at the page", "sha256").hex()
        self._cookie = f"tierstore-{hashlib.sha256(secret.encode()).hexdigest()[:8]}"
        self._secret = secret

    def refusal(self, request: WebRequest) -> WebAnswer | None:
        """For requests that no path of this server is for: those that name another host."""
        name = foreign_host(self._host, request.headers.get("host", ""))
        return None if name is None else _text(421, f"this is not {name}: ask for localhost or 127.0.0.1")

    def strange(self, request: WebRequest) -> WebAnswer | None:
        """The refusal of a request that names another host, or that a web page elsewhere has made."""
        if (refusal := self.refusal(request)) is not None:
            return refusal
        return None if _same_site(request) else _text(403, "this page is for its own site")

    def answer(self, request: WebRequest) -> WebAnswer | None:
        """None for what is no path of the page."""
        path = request.path
        if path not in ("/", PAGE.rstrip("/")) and not path.startswith(PAGE):
            return None
        if (refusal := self.strange(request)) is not None:
            return refusal
        if path in ("/", PAGE.rstrip("/")):
            query = f"?{request.query}" if request.query else ""
            return WebAnswer(307, {"Location": f"{PAGE.strip('/')}/{query}", **_HEADERS})
        if self._token is None and not self._loopback:
            return _text(403, f"the page is shown off loopback only with a token: {self._how}")
        return self._of_page(request, path.removeprefix(PAGE))

    def _of_page(self, request: WebRequest, name: str) -> WebAnswer:
        if not name and (request.token or request.method == "POST"):
            return self._let_in(request)
        if request.method != "GET":
            return _text(405, "GET only")
        allowed = self._allowed(request)
        if name == "feed":
            if not allowed:
                return _text(401, "the token is needed", {"WWW-Authenticate": "Bearer"})
            return WebAnswer(200, {"Content-Type": _EVENTS, **_HEADERS}, follows=True)
        if not name:
            return self._page() if allowed else self._ask("")
        body = _assets().get(name)
        if body is None:
            return _text(404, "there is no such file")
        return WebAnswer(200, {"Content-Type": _KINDS[Path(name).suffix], **_HEADERS}, body)

    def _page(self) -> WebAnswer:
        return WebAnswer(200, {"Content-Type": _KINDS[".html"], **_HEADERS}, _documents()["page.html"])

    def _ask(self, why: str) -> WebAnswer:
        headers = {"Content-Type": _KINDS[".html"], "WWW-Authenticate": "Bearer", **_HEADERS}
        form = _documents()["token.html"].replace(b"{title}", self._title.encode())
        return WebAnswer(401, headers, form.replace(b"{why}", why.encode()))

    def _let_in(self, request: WebRequest) -> WebAnswer:
        if self._token is None:
            return WebAnswer(303, {"Location": ".", **_HEADERS})
        if not _equal(request.token, self._token):
            return self._ask("That is not the token.")
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
    """The page's token. Raises :class:`UsageError`, also for one that can be guessed."""
    if file is None:
        return None
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the page's token: {error}") from error
    if len(token) < _MIN_TOKEN:
        raise UsageError(f"{file}: the page's token has {len(token)} characters, give at least {_MIN_TOKEN}")
    return token


def _same_site(request: WebRequest) -> bool:
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        # Somebody may follow a link from elsewhere to the page, and nothing else.
        return request.headers.get("sec-fetch-mode") == "navigate" and request.method == "GET"
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


def _equal(given: str, right: str) -> bool:
    """In a time that says nothing of where they differ."""
    return hmac.compare_digest(given.encode(), right.encode())


def _text(status: int, text: str, headers: Mapping[str, str] | None = None) -> WebAnswer:
    return WebAnswer(status, {"Content-Type": _TEXT, **_HEADERS, **(headers or {})}, f"{text}\n".encode())


@functools.cache
def _documents() -> dict[str, bytes]:
    """What is shipped, by file name."""
    folder = resources.files("tierstore.dashboard") / "assets"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


def _assets() -> Mapping[str, bytes]:
    """What a page asks for by name: no page itself, and nothing secret."""
    kinds = (".js", ".css", ".svg")
    return {name: body for name, body in _documents().items() if name.endswith(kinds)}
