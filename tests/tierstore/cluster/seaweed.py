"""A real S3 server (SeaweedFS) of one machine, and a proxy before it that injects faults."""

from __future__ import annotations

import contextlib
import json
import shutil
import socketserver
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tierstore.testing.clock import wait_until
from tierstore.testing.processes import free_port

BUCKET = "pages"
KEY, SECRET = "testkey", "not-a-secret-of-anybody"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
_PORTS = ("master", "volume", "filer", "s3")


def weed() -> str | None:
    """Return the server's program: that of this Python's environment, or the one on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class SeaweedServer:
    """``weed server -s3`` with one identity and one bucket, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = {name: (free_port(), free_port()) for name in _PORTS}
        self.endpoint = f"http://127.0.0.1:{self.ports['s3'][0]}"
        self.process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def start(self) -> None:
        assert self.process is None
        command = [weed() or "weed", "-logtostderr=true", "server", f"-dir={self.directory}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-s3", "-s3.iam=false"]
        command += [f"-s3.config={self.directory}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-master.volumeSizeLimitMB=64", "-volume.max=64", "-volume.minFreeSpace=1"]
        command += [f"-{name}.localSocket={self.directory}/{name}.sock" for name in ("filer", "s3")]
        for name, (port, grpc) in self.ports.items():
            command += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
        with (self.directory / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._ready)

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "weed.log").read_text()[-2000:]
        try:
            store = self.bucket_store()
            store.put("ready", b"yes")
        except Exception:  # whatever is not up yet  # noqa: BLE001
            return False
        return True

    def bucket_store(self, bucket: str = BUCKET):
        """Return obstore's own client of a bucket, for what a test does to it."""
        from obstore.store import S3Store

        return S3Store(
            bucket,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "20s"},
            retry_config={"max_retries": 0},
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None


class FaultyProxy:
    """An HTTP proxy to ``endpoint``. ``fault`` answers requests of these methods wrongly:

    ``status``     503 SlowDown
    ``skewed``     403 RequestTimeTooSkewed, as for a host whose clock is wrong
    ``half``       the first half of the body, with its own length
    ``cut``        the first half of the body, with the length of the whole
    ``flip``       one wrong byte in the middle
    ``longer``     some bytes too many
    ``versions``   the right answer, as from a bucket that keeps old versions of its objects
    ``hang``       no answer while this is set
    """

    def __init__(self, endpoint: str) -> None:
        self.fault = ""
        self.methods: tuple[str, ...] = ("GET", "PUT", "POST", "DELETE")
        self.only = ""  # part of the path of those requests
        self.seen: list[str] = []
        host, _, port = endpoint.removeprefix("http://").partition(":")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_all(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.seen.append(f"{self.command} {self.path}")
                fault = proxy.fault if self.command in proxy.methods and proxy.only in self.path else ""
                while fault == "hang" and proxy.fault == "hang":
                    time.sleep(0.02)
                if fault in _ERRORS:
                    status, code = _ERRORS[fault]
                    document = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
                    self._answer(status, {}, document, len(document))
                    return
                connection = HTTPConnection(host, int(port), timeout=30)
                try:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    response = connection.getresponse()
                    data = response.read()
                except OSError:
                    self.close_connection = True
                    return
                finally:
                    connection.close()
                told = len(data)
                if data:
                    half = len(data) // 2
                    wrong = {
                        "half": data[:half],
                        "cut": data[:half],
                        "flip": data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :],
                        "longer": data + bytes(100),
                    }
                    data = wrong.get(fault, data)
                    told = told if fault == "cut" else len(data)
                headers = dict(response.getheaders())
                if fault == "versions":
                    headers["x-amz-version-id"] = "first"
                self._answer(response.status, headers, data, told)
                self.close_connection = self.close_connection or fault == "cut"

            def _answer(self, status: int, headers: dict[str, str], data: bytes, told: int) -> None:
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in headers.items():
                        if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                            self.send_header(name, value)
                    told = int(headers.get("Content-Length", told)) if self.command == "HEAD" else told
                    self.send_header("Content-Length", str(told))
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_all

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 64

            def handle_error(self, request: object, address: object) -> None:
                """Ignore clients that have gone."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.fault = ""
        self._server.shutdown()
        self._server.server_close()


_ERRORS = {"status": (503, "SlowDown"), "skewed": (403, "RequestTimeTooSkewed")}
