"""A small completion server that is broken in one way: `python -m tests.marlin.answering MODE PORT-FILE`.

sound        the same sensible answer to a prompt every time
garbage      `!!!!` to everything
concurrent   sensible alone, one token over and over while several requests are open
unstable     sensible, but never the same
errors       status 500
nan          log probabilities that are no numbers
strict       refuses fields that OpenAI's own servers do not know
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OPENAI = {"model", "prompt", "max_tokens", "temperature", "logprobs"}
TEXT = "the quick brown fox jumps over lazy dogs while seven wise owls watch from old trees near a quiet river"
WORDS = TEXT.split(" ")


class Answering(BaseHTTPRequestHandler):
    mode = "sound"
    open = 0
    asked = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "the-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Answering.open += 1
            Answering.asked += 1
            count = Answering.asked
        time.sleep(0.05)  # so that requests of one round meet
        crowd = Answering.open > 1
        if self.mode == "errors":
            self._send(500, {"error": "broken"})
        elif self.mode == "strict" and set(body) - OPENAI:
            self._send(400, {"error": "unknown fields"})
        else:
            self._send(200, {"choices": [self._choice(body["prompt"], count, crowd)]})
        with self.lock:
            Answering.open -= 1

    def _choice(self, prompt: str, count: int, crowd: bool) -> dict[str, Any]:
        start = len(prompt) + (count if self.mode == "unstable" else 0)
        ids = [(start + i) % len(WORDS) for i in range(17)]
        text = " ".join(WORDS[i] for i in ids)
        if self.mode == "garbage":
            ids, text = [0] * 40, "!" * 40
        if self.mode == "concurrent" and crowd:
            ids, text = [3] * 40, "fox " * 40
        logprobs = [float("nan") if self.mode == "nan" else -0.5] * len(ids)
        return {"text": text, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "length"}

    def _send(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests read no log of this server."""


def main(mode: str, port_file: str) -> None:
    Answering.mode = mode
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    part = Path(port_file + ".part")
    part.write_text(str(server.server_address[1]))
    part.replace(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
