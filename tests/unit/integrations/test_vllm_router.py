"""The router of tep.integrations.vllm, between servers that answer as vLLM's do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tep.integrations.vllm.router import Router

PARTS = [b'data: {"text": "a"}\n\n', b'data: {"text": "b"}\n\n', b"data: [DONE]\n\n"]


class Server(ThreadingHTTPServer):
    """An instance: keeps what it was asked."""

    daemon_threads = True

    def __init__(self, name):
        self.name, self.asked = name, []
        self.going = threading.Event()
        self.going.set()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"path": self.path})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.going.wait(60)
        if self.headers["Content-Type"] != "application/json":
            self.answer({"error": "vLLM takes JSON alone"}, 415)
        elif "prompt" not in body:
            self.answer({"error": "no prompt"}, 400)
        elif body.get("stream"):
            self.send_response(200)
            self.end_headers()
            for part in PARTS:
                self.wfile.write(part)
                self.wfile.flush()
        else:
            params = {"do_remote_prefill": True, "tep": {"key": self.server.name}}
            self.answer({"text": self.server.name, "kv_transfer_params": params})

    def answer(self, value, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def servers():
    made = {name: Server(name) for name in ("p0", "p1", "d0")}
    yield made
    for one in made.values():
        one.shutdown()
        one.server_close()


@pytest.fixture
def router(servers):
    """The command of the how-to."""
    options = [f"--{'prefill' if k[0] == 'p' else 'decode'}={s.url}" for k, s in servers.items()]
    command = [sys.executable, "-m", "tep.integrations.vllm.router", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()


def ask(url, body=None):
    raw = None if body is None else json.dumps(body).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, raw, kind)  # noqa: S310  # a server of this test
    with urllib.request.urlopen(request, timeout=60) as found:  # noqa: S310  # the same
        return found.read()


def test_a_prompt_is_computed_here_and_decoded_there(servers, router):
    """Both instances see the same request, but for what belongs to their half."""
    body = {"prompt": "x", "max_tokens": 7, "min_tokens": 3, "stream": True, "temperature": 0}
    assert b"".join(PARTS) == ask(f"{router}/v1/completions", body)
    assert b"".join(PARTS) == ask(f"{router}/v1/completions", body)

    (first,), (second,) = servers["p0"].asked, servers["p1"].asked
    assert first == second == {
        "prompt": "x", "max_tokens": 1, "stream": False, "temperature": 0,
        "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    assert ["p0", "p1"] == [b["kv_transfer_params"]["tep"]["key"] for b in servers["d0"].asked]
    assert body == {k: v for k, v in servers["d0"].asked[0].items() if k != "kv_transfer_params"}


@pytest.mark.slow
def test_instances_that_are_gone(servers, router):
    """A prefiller that died costs no request; the decoder computes alone if there is none."""
    servers["p0"].shutdown()
    servers["p0"].server_close()
    for _ in range(3):
        ask(f"{router}/v1/completions", {"prompt": "x"})
    assert {"p1"} == {b["kv_transfer_params"]["tep"]["key"] for b in servers["d0"].asked}
    alive = json.loads(ask(f"{router}/instances"))
    assert [False, True] == list(alive["prefill"].values())
    assert [True] == list(alive["decode"].values())
    servers["p1"].shutdown()
    servers["p1"].server_close()
    ask(f"{router}/v1/completions", {"prompt": "x"})
    assert "kv_transfer_params" not in servers["d0"].asked[-1]
    servers["d0"].shutdown()
    servers["d0"].server_close()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        ask(f"{router}/v1/completions", {"prompt": "x"})


def test_an_instance_at_work_is_alive(servers):
    """While a prompt is computed its instance stood behind the dead ones."""
    busy = servers["p0"]
    with Router(("127.0.0.1", 0), [busy.url], [servers["d0"].url]) as router:
        (instance,) = router.instances["prefill"]
        busy.going.clear()
        asking = threading.Thread(target=router.prefill, args=("/v1/completions", {"prompt": "x"}))
        asking.start()
        end_s = time.monotonic() + 60
        while not busy.asked:
            assert time.monotonic() < end_s
        assert instance.alive
        busy.going.set()
        asking.join()


def test_other_requests_go_to_the_decoder(router):
    """Clients ask for the models first; errors are vLLM's."""
    assert {"path": "/v1/models"} == json.loads(ask(f"{router}/v1/models"))
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(f"{router}/v1/completions", {"wrong": 1})
