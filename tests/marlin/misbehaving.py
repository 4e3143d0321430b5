"""A server whose every folder answers in a wrong way of its own: `python -m tests.marlin.misbehaving PORT-FILE`."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def whole(choice: object) -> bytes:
    return json.dumps({"choices": [choice]}).encode()


def scored(value: object) -> bytes:
    """An answer to a row of three tokens, 5 6 7, with one log probability in it."""
    given = [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": value}}]
    told = {"tokens": ["token_id:1"], "token_logprobs": [value]}
    return whole({"text": "a", "finish_reason": "stop", "token_ids": [1], "logprobs": told, "prompt_logprobs": given})


BODIES = {
    "html": b"<html><body>Welcome to nginx!</body></html>",
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "half": whole({"text": "abc", "token_ids": [1, 2, 3]})[:-9],
    "number": b"42",
    "list": b"[]",
    "no-choices": b"{}",
    "null-choice": whole(None),
    "text-choice": whole("abc"),
    "choices-by-name": b'{"choices": {"text": "a"}}',
    "ids-of-text": whole({"text": "a", "token_ids": ["x", None], "prompt_logprobs": [None, ["x"], 4]}),
    "logprobs-of-list": whole({"text": "a", "logprobs": [1], "prompt_logprobs": [None, {"a": {}}, {}]}),
    "nested": b"[" * 200_000,
    "nan-text": scored("NaN"),
    "number-text": scored("-1.5"),
    "true": scored(True),
    "positive": scored(3.0),
    "nan": scored(-1.0).replace(b"-1.0}}]", b"NaN}}]").replace(b"[-1.0]", b"[NaN]"),
    "infinite": scored(-1.0).replace(b"-1.0}}]", b"1e999}}]").replace(b"[-1.0]", b"[1e999]"),
    "other-token": whole({"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"9": {"logprob": -1.0}}]}),
    "short-row": whole({"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]}),
}
STREAMS = {
    "stream-ids": b'data: {"choices": [{"token_ids": ["x"], "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
    "stream-count": b'data: {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": "many"}}\n\n',
    "stream-list": b'data: {"choices": [[1]]}\n\n',
    "stream-half": b'data: {"choices": [{"te',
    "stream-none": b"",
}


class Misbehaving(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer()

    def answer(self) -> None:
        how = self.path.split("/")[1]
        self.close_connection = True
        if how == "hang":
            time.sleep(600)
        elif how == "drop":
            return
        elif how == "trickle":
            self.forever(b" ", 0.05)
        elif how == "cut":
            self.send(200, b'{"choices": [', longer=100)
        elif how == "elsewhere":
            self.send(307, b"", Location="/html/v1/completions")
        elif how == "gzip":
            self.send(200, b"no gzip at all", **{"Content-Encoding": "gzip"})
        elif how == "locked":
            known = self.headers["Authorization"] == "Bearer sesame"
            self.send(200 if known else 401, b'{"data": [{"id": "m"}]}' if known else b'{"error": "Unauthorized"}')
        else:
            self.send(200, {**BODIES, **STREAMS}[how])

    def send(self, status: int, body: bytes, longer: int = 0, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) + longer))
        self.end_headers()
        self.wfile.write(body)

    def forever(self, part: bytes, pause: float) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(part)
            self.wfile.flush()
            time.sleep(pause)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests read no log of this server."""


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what the tests want."""


def main(port_file: str) -> None:
    server = Quiet(("127.0.0.1", 0), Misbehaving)
    part = Path(port_file + ".part")
    part.write_text(str(server.server_address[1]))
    part.replace(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
