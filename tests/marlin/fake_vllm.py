#!/usr/bin/env python3
"""A server that speaks like vLLM 0.25.1 and computes nothing: a real process with real HTTP, for the tests of the gate.

    fake_vllm.py --version
    fake_vllm.py serve MODEL --port N [options of vLLM]

Its language model is a hash, so answers are reproducible, varied and end by themselves. FAKE_FAULT names what is wrong:

    graphs        garbage unless --enforce-eager          kernel        garbage on Marlin
    checkpoint    far from the reference in every run     concurrent    garbage among four and more requests
    atomic        garbage with VLLM_MARLIN_USE_ATOMIC_ADD=1             nan      log probabilities that are none
    crash         dies in its FAKE_LATE-th (10.) request  import        dies at the start: a missing module
    hang          never answers                           slow          answers after a while
    machete       another kernel than asked for           fallback      warns that a backend is not used
    drafts        a draft head that guesses               short-log     no line about the KV cache
    orphan        leaves a child in a session of its own  stubborn      ignores SIGTERM
    utf8          broken characters                       empty         empty answers
    rank          another kernel on the last rank         late          garbage from the FAKE_LATE-th request on
    stall         never answers its FAKE_LATE-th (10.)    leak          keeps memory with every request
    drift         other numbers from the FAKE_LATE-th request on
    no-graphs-log nothing about captured graphs           bangs         `!!!!` in every answer
    reference     `!!!!` in every answer, of the reference too
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "0.25.1"
VOCABULARY = 2048
TOP = 24
REST = 0.02
EOS = 1
GARBAGE = 7
FAULT = os.environ.get("FAKE_FAULT", "")
LATE = int(os.environ.get("FAKE_LATE", "10"))
DELAY = float(os.environ.get("FAKE_TOKEN_SECONDS", "0"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    for name in ("host", "port", "served-model-name", "linear-backend", "speculative-config", "moe-backend"):
        parser.add_argument(f"--{name}", default="")
    others = "max-model-len gpu-memory-utilization tensor-parallel-size kernel-config gdn-prefill-backend max-num-seqs"
    for name in (*others.split(), "max-cudagraph-capture-size", "kv-cache-memory-bytes"):
        parser.add_argument(f"--{name}", default="")
    for name in ("enforce-eager", "no-enable-prefix-caching", "language-model-only"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def say(text: str, *, level: str = "INFO", file: str = "core.py:114", who: str = "EngineCore", pid: int = 0) -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    sys.stdout.write(f"({who} pid={pid or os.getpid()}) {level} {stamp} [{file}] {text}\n")
    sys.stdout.flush()


def plain(text: str) -> None:
    sys.stdout.write(f"(APIServer pid={os.getpid()}) INFO:     {text}\n")
    sys.stdout.flush()


def digest(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")


class Engine:
    """What the server knows of its checkpoint and of its own faults."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        config = json.loads((Path(given.model) / "config.json").read_text())
        block = config.get("quantization_config") or {}
        groups = (block.get("config_groups") or {}).values()
        formats = {str(group.get("format") or block.get("format")) for group in groups}
        self.integer, self.nvfp4 = "pack-quantized" in formats, "nvfp4-pack-quantized" in formats
        self.fp8 = bool(formats & {"float-quantized", "naive-quantized"})
        self.quantized = bool(formats)
        disabled = os.environ.get("VLLM_DISABLED_KERNELS", "")
        self.marlin = "MarlinLinearKernel" not in disabled.split(",") and FAULT != "machete"
        self.eager = given.enforce_eager
        self.ranks = int(given.tensor_parallel_size or 1)
        self.kept: list[bytes] = []
        self.atomic = os.environ.get("VLLM_MARLIN_USE_ATOMIC_ADD") == "1"
        self.speculation = json.loads(given.speculative_config) if given.speculative_config else None
        self.lock = threading.Lock()
        self.running = self.requests = self.drafts = self.generated = self.prompted = 0
        self.accepted = [0, 0, 0, 0]

    def noise(self) -> float:
        """How far the logits are from those of the reference."""
        if not self.quantized:
            return 0.0
        wrong = (
            FAULT == "checkpoint" or (FAULT == "graphs" and not self.eager)
            or (FAULT == "kernel" and self.marlin) or (FAULT == "atomic" and self.atomic)
            or (FAULT == "drift" and self.requests >= LATE)
        )  # fmt: skip
        return 6.0 if wrong else 0.15 + (0.001 if self.marlin else 0.002)

    def position(self, before: int, top: int, actual: int) -> dict[int, float]:
        """Log probabilities after one token: the most likely ones and the actual one."""
        noise = self.noise()
        ids = [digest("id", before, j) % VOCABULARY for j in range(TOP)]
        logits = {
            token: 4.0 / (1 + j) + noise * ((digest("n", before, j) % 1000) / 1000 - 0.5) for j, token in enumerate(ids)
        }
        total = sum(math.exp(value) for value in logits.values()) / (1 - REST)
        known = {token: value - math.log(total) for token, value in logits.items()}
        best = dict(sorted(known.items(), key=lambda pair: -pair[1])[:top])
        best[actual] = known.get(actual, math.log(REST / (VOCABULARY - TOP)))
        return best

    def answer(self, prompt: list[int], limit: int, ignore_eos: bool) -> tuple[list[int], str]:
        """(tokens, why they end)"""
        broken = self.quantized and (
            (FAULT == "graphs" and not self.eager) or (FAULT == "kernel" and self.marlin)
            or (FAULT == "atomic" and self.atomic) or (FAULT == "concurrent" and self.crowded(0.15))
            or (FAULT == "late" and self.requests >= LATE)
        )  # fmt: skip
        if broken:
            return [GARBAGE] * limit, "length"
        seed = digest(*prompt)
        length = 24 + seed % 40
        ids = [2 + digest(seed, i) % (VOCABULARY - 2) for i in range(limit if ignore_eos else min(limit, length))]
        if len(ids) < limit and not ignore_eos:
            return [*ids, EOS], "stop"
        return ids, "length"

    def crowded(self, patience: float) -> bool:
        """Whether four requests run, now or within a moment."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if self.running >= 4:
                return True
            time.sleep(0.01)
        return False

    def draft(self, tokens: int) -> None:
        if self.speculation is None:
            return
        k = int(self.speculation["num_speculative_tokens"])
        rates = [0.02, 0.001] if FAULT == "drafts" and self.quantized else [0.8, 0.6, 0.4, 0.3]
        steps = max(1, int(tokens / (1 + sum(rates[:k]))))
        with self.lock:
            self.drafts += steps
            for i, rate in enumerate(rates[:k]):
                self.accepted[i] += round(steps * rate)

    def metrics(self) -> str:
        label = 'engine="0",model_name="m"'
        lines = [
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.",
            f"vllm:prompt_tokens_total{{{label}}} {self.prompted}.0",
            f"vllm:generation_tokens_total{{{label}}} {self.generated}.0",
            f"vllm:prefix_cache_queries_total{{{label}}} {float(os.environ.get('FAKE_QUERIES', 0)) * self.prompted}",
            f"vllm:prefix_cache_hits_total{{{label}}} {float(os.environ.get('FAKE_HITS', 0)) * self.prompted}",
            f'vllm:cache_config_info{{block_size="144",enable_prefix_caching="False",{label},'
            'kv_cache_size_tokens="881810"} 1.0',
        ]  # fmt: skip
        if self.speculation is not None:
            k = int(self.speculation["num_speculative_tokens"])
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{label}}} {self.drafts}.0",
                f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {self.drafts * k}.0",
                f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {sum(self.accepted)}.0",
                *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{i}"}} {self.accepted[i]}.0'
                  for i in range(k)),
            ]  # fmt: skip
        return "\n".join(lines) + "\n"


def text_of(ids: list[int], quantized: bool) -> str:
    if not quantized and FAULT != "reference":
        return "".join(f" w{token}" for token in ids if token != EOS)
    if FAULT in ("bangs", "reference"):
        return "Hello !!!!!!!!"
    if FAULT == "utf8":
        return "caf\ufffd and so on"
    return "" if FAULT == "empty" else "".join(f" w{token}" for token in ids if token != EOS)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        sys.stdout.write(f'(APIServer pid={os.getpid()}) INFO:     127.0.0.1:1 - "{self.requestline}" 200 OK\n')
        sys.stdout.flush()

    def send(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.send(self.engine.metrics().encode(), "text/plain")
        elif self.path == "/version":
            self.send(json.dumps({"version": VERSION}).encode())
        elif self.path == "/v1/models":
            name = self.engine.given.served_model_name or self.engine.given.model
            self.send(json.dumps({"data": [{"id": name}]}).encode())
        else:
            self.send(b"")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine = self.engine
        with engine.lock:
            engine.running += 1
            engine.requests += 1
            engine.prompted += len(asked["prompt"])
            number = engine.requests
        try:
            if FAULT == "crash" and engine.quantized and number >= LATE:
                crash()
            if FAULT == "stall" and engine.quantized and number >= LATE:
                time.sleep(600)
            if FAULT == "leak" and engine.quantized:
                engine.kept.append(os.urandom(1 << 20))
            self.complete(asked)
        finally:
            with engine.lock:
                engine.running -= 1

    def complete(self, asked: dict[str, Any]) -> None:
        engine, prompt = self.engine, asked["prompt"]
        if FAULT == "nan" and engine.quantized:
            what = "Out of range float values are not JSON compliant: nan"
            self.send(json.dumps({"error": {"message": what}}).encode(), status=500)
            return
        ids, reason = engine.answer(prompt, asked["max_tokens"], bool(asked.get("ignore_eos")))
        engine.draft(len(ids))
        with engine.lock:
            engine.generated += len(ids)
        if asked.get("stream"):
            self.stream(ids, reason, len(prompt))
            return
        time.sleep(DELAY * len(ids))
        choice: dict[str, Any] = {
            "index": 0,
            "text": text_of(ids, engine.quantized),
            "finish_reason": reason,
            "token_ids": ids,
        }
        if asked.get("logprobs") is not None:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in ids], "token_logprobs": [-0.5 for _ in ids],
            }  # fmt: skip
        if asked.get("prompt_logprobs") is not None:
            top = asked["prompt_logprobs"]
            choice["prompt_logprobs"] = [None] + [
                {str(t): {"logprob": v, "rank": 1, "decoded_token": "x"} for t, v in engine.position(a, top, b).items()}
                for a, b in itertools.pairwise(prompt)
            ]
        self.send(json.dumps({"id": "c", "object": "text_completion", "model": "m", "choices": [choice]}).encode())

    def stream(self, ids: list[int], reason: str, prompted: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for at, token in enumerate(ids):
            time.sleep(DELAY)
            ended = reason if at == len(ids) - 1 else None
            self.event({"choices": [{"index": 0, "text": f" w{token}", "token_ids": [token], "finish_reason": ended}]})
        self.event({"choices": [], "usage": {"completion_tokens": len(ids), "prompt_tokens": prompted}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


def crash() -> None:
    file = "core.py:1196"
    say("EngineCore encountered a fatal error.", level="ERROR", file=file)
    say("Traceback (most recent call last):", level="ERROR", file=file)
    say('  File "VLLM/v1/engine/core.py", line 1187, in run_engine_core', level="ERROR", file=file)
    say("    engine_core.run_busy_loop()", level="ERROR", file=file)
    say("torch.AcceleratorError: CUDA error: an illegal instruction was encountered", level="ERROR", file=file)
    os._exit(1)


def start_log(engine: Engine) -> None:
    given = engine.given
    named = {"model_tag": given.model, "model": given.model, "port": int(given.port)}
    if given.linear_backend:
        named["linear_backend"] = given.linear_backend
    if engine.ranks > 1:
        named["tensor_parallel_size"] = engine.ranks
    if engine.speculation:
        named["speculative_config"] = engine.speculation
    say(f"non-default args: {named}", who="APIServer", file="api_utils.py:273")
    quantization = "compressed-tensors" if engine.quantized else "None"
    speculation = (
        f"SpeculativeConfig(method='mtp', model='{given.model}', "
        f"num_spec_tokens={engine.speculation['num_speculative_tokens']})" if engine.speculation else "None"
    )  # fmt: skip
    mode = "<CUDAGraphMode.NONE: 0>" if engine.eager else "<CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>"
    say(
        f"Initializing a V1 LLM engine (v{VERSION}) with config: model='{given.model}', "
        f"speculative_config={speculation}, tokenizer='{given.model}', dtype=torch.bfloat16, max_seq_len=2048, "
        f"tensor_parallel_size={engine.ranks}, quantization={quantization}, enforce_eager={engine.eager}, "
        f"compilation_config={{'cudagraph_mode': {mode}}}, "
        f"kernel_config=KernelConfig(moe_backend='auto', linear_backend='{given.linear_backend or 'auto'}')"
    )
    if FAULT == "import" and engine.quantized:
        say(f"Starting to load model {given.model}...", file="gpu_model_runner.py:5209")
        sys.stdout.write("Traceback (most recent call last):\n")
        sys.stdout.write('  File "VLLM/entrypoints/cli/main.py", line 1, in <module>\n    import vllm._C\n')
        sys.stdout.write("ModuleNotFoundError: No module named 'vllm._C'\n")
        sys.stdout.flush()
        sys.exit(1)
    workers(engine)
    if FAULT != "short-log":
        say("GPU KV cache size: 12,441,786 tokens", file="kv_cache_utils.py:2146")
        say("Maximum concurrency for 2,048 tokens per request: 3037.55x", file="kv_cache_utils.py:2147")
    took = "init engine (profile, create kv cache, warmup model) took 15.51 s"
    say(took, file="core.py:337")


def workers(engine: Engine) -> None:
    """What every rank prints; a later rank is some lines behind the one before it."""
    lag = 3
    told = [list(worker(engine, rank)) for rank in range(engine.ranks)]
    for moment in range(len(told[0]) + lag * engine.ranks):
        for rank, lines in enumerate(told):
            at = moment - lag * rank
            if 0 <= at < len(lines):
                level, file, text = lines[at]
                who = "EngineCore" if engine.ranks == 1 else f"Worker_TP{rank}"
                say(text, level=level, file=file, who=who, pid=os.getpid() + (rank if engine.ranks > 1 else 0))


def worker(engine: Engine, rank: int) -> Iterator[tuple[str, str, str]]:
    """(level, file, text) of one rank."""
    yield "INFO", "gpu_model_runner.py:5209", f"Starting to load model {engine.given.model}..."
    yield from kernels(engine, other=FAULT == "rank" and rank == engine.ranks - 1)
    attention = "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN']."
    yield "INFO", "cuda.py:476", attention
    if engine.speculation:
        yield "INFO", "gpu_model_runner.py:5233", "Loading drafter model..."
        what = "Detected MTP model. Sharing target model embedding weights with the draft model."
        yield "INFO", "llm_base_proposer.py:1466", what
    took = f"Model loading took {0.03 + rank / 100:.2f} GiB memory and 0.542242 seconds"
    yield "INFO", "gpu_model_runner.py:5306", took
    if FAULT != "short-log":
        yield "INFO", "gpu_worker.py:538", f"Available KV cache memory: {41.3 - rank / 10:.1f} GiB"
    if not engine.eager and FAULT != "no-graphs-log":
        yield "INFO", "gpu_model_runner.py:6707", "Graph capturing finished in 2 secs, took 0.06 GiB"


def kernels(engine: Engine, *, other: bool) -> Iterator[tuple[str, str, str]]:
    if FAULT == "fallback":
        what = "--linear-backend=marlin has no kernel for this linear layer type; using automatic selection"
        yield "WARNING", "__init__.py:555", what
    if engine.integer:
        name = "MarlinLinearKernel" if engine.marlin else "TritonW4A16LinearKernel"
        name = "MacheteLinearKernel" if other or "machete" in (FAULT, engine.given.linear_backend) else name
        yield "INFO", "compressed_tensors_wNa16.py:137", f"Using {name} for CompressedTensorsWNA16"
    if engine.nvfp4:
        yield "INFO", "__init__.py:929", "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
    if engine.fp8:
        yield "INFO", "__init__.py:640", "Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8"


def main() -> None:
    if "--version" in sys.argv:
        sys.stdout.write(f"{VERSION}\n")
        return
    engine = Engine(arguments())
    if FAULT == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if FAULT in ("orphan", "stubborn"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    start_log(engine)
    if FAULT == "hang" and engine.quantized:
        time.sleep(600)
    if FAULT == "slow":
        time.sleep(0.7)
    Handler.engine = engine
    ThreadingHTTPServer.request_queue_size = 64
    server = ThreadingHTTPServer(("127.0.0.1", int(engine.given.port)), Handler)
    server.daemon_threads = True
    say(f"Starting vLLM server on http://127.0.0.1:{engine.given.port}", who="APIServer", file="api_server.py:616")
    plain("Application startup complete.")
    if FAULT != "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    plain("Application shutdown complete.")


if __name__ == "__main__":
    main()
