"""A router for prefill and decode instances of vLLM with the TepConnector. No vLLM is needed.

    python -m tep.integrations.vllm.router --prefill http://HOST:8100 --decode http://HOST:8200

Each completion goes to a prefill instance with max_tokens=1 first, and then, with the
kv_transfer_params of its answer, to a decode instance, whose answer goes to the client as it comes.
Where no prefill instance answers, the decode instance computes the prompt itself. GET /instances
says which ones are alive.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

__all__ = ["Router", "main"]

_LOOK_S: Final = 2.0
_ANSWER_S: Final = 3600.0
_CHUNK: Final = 1 << 16
_ALONE: Final = {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
_LEFT_OUT: Final = ("stream_options", "min_tokens", "max_completion_tokens")


class _Instance:
    """One vLLM server."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url if "//" in url else f"http://{url}")
        self.url, self.host, self.port = url, place.hostname or "127.0.0.1", place.port or 80
        self.alive = True

    def ask(self, method: str, path: str, body: bytes | None, limit_s: float) -> HTTPResponse:
        """Send a request; OSError or HTTPException if it does not answer."""
        connection = HTTPConnection(self.host, self.port, timeout=limit_s)
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, body, kind)
            found = connection.getresponse()
        except (OSError, HTTPException):
            self.alive = False
            raise
        self.alive = True
        return found

    def look(self) -> bool:
        """Return whether the server says that it is well."""
        with contextlib.suppress(OSError, HTTPException):  # it is marked already
            self.alive = self.ask("GET", "/health", None, _LOOK_S).status == 200
        return self.alive


class Router(ThreadingHTTPServer):
    """The server, at a host and a port (0: any), of instances by their URLs."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], prefills: list[str], decodes: list[str]) -> None:
        urls = {"prefill": prefills, "decode": decodes}
        self.instances = {kind: [_Instance(url) for url in some] for kind, some in urls.items()}
        self._turns = {kind: itertools.count() for kind in urls}
        super().__init__(address, _Handler)

    def order(self, kind: str) -> list[_Instance]:
        """List the instances of a kind in turn, those that did not answer last time at the end."""
        instances = self.instances[kind]
        first = next(self._turns[kind]) % max(1, len(instances))
        return sorted(instances[first:] + instances[:first], key=lambda one: not one.alive)

    def prefill(self, path: str, body: dict[str, Any]) -> Any:
        """Have a prompt computed; return its transfer parameters, or None."""
        alone = {key: value for key, value in body.items() if key not in _LEFT_OUT} | _ALONE
        for one in self.order("prefill"):
            try:
                found = one.ask("POST", path, json.dumps(alone).encode(), _ANSWER_S)
                if found.status == 200:
                    return json.loads(found.read()).get("kv_transfer_params")
            except (OSError, HTTPException, ValueError) as error:
                sys.stderr.write(f"router: {one.url}: {type(error).__name__}: {error}\n")
        return None


class _Handler(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        if self.path == "/instances":
            kinds = self.server.instances.items()
            found = {kind: {one.url: one.look() for one in some} for kind, some in kinds}
            self._answer(200, json.dumps(found).encode())
        else:
            self._pass_on("GET", None)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(raw)
            if "completions" in self.path and (params := self.server.prefill(self.path, body)):
                raw = json.dumps(body | {"kv_transfer_params": params}).encode()
        except (ValueError, AttributeError, TypeError):
            pass  # no JSON object: vLLM says so
        self._pass_on("POST", raw)

    def _pass_on(self, method: str, raw: bytes | None) -> None:
        """Send a request to a decode instance, and its answer back as it comes."""
        for one in self.server.order("decode"):
            try:
                found = one.ask(method, self.path, raw, _ANSWER_S)
            except (OSError, HTTPException) as error:
                sys.stderr.write(f"router: {one.url}: {type(error).__name__}: {error}\n")
                continue
            self.send_response(found.status)
            self.send_header("Content-Type", found.getheader("Content-Type", "application/json"))
            self.end_headers()
            while part := found.read1(_CHUNK):
                self.wfile.write(part)
            return
        self._answer(503, b'{"error": "no decode instance answers"}')

    def _answer(self, status: int, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Write no line for each request."""


def main(argv: list[str]) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tep.integrations.vllm.router")
    parser.add_argument("--prefill", action="append", default=[], metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args(argv)
    with Router((asked.host, asked.port), asked.prefill, asked.decode) as router:
        sys.stdout.write(f"router at http://{asked.host}:{router.server_port}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            router.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
