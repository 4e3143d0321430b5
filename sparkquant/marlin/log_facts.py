"""The plain facts of a log: versions, settings, memory, start-up, requests, acceptance, orderly ends."""

from __future__ import annotations

import ast
import re
from typing import Any

from sparkquant.marlin.server_log import Drafting

SECRET = re.compile(r"key|token$|secret|password|credential", re.IGNORECASE)
MAX_ARGUMENTS = 20_000

VLLM_CONFIG = re.compile(r"Initializing a V1 LLM engine \(v(\S{1,60}?)\) with config: ")
VLLM_VERSION = re.compile(r"vLLM (?:API )?server version (\S{1,60}?)(?:,|$)|V1 LLM engine \(v(\S{1,60}?)\)")
ARGUMENTS = re.compile(r"non-default args: (\{.*\})\s*$")
SETTINGS = {
    "model": re.compile(r"\bmodel='([^']{0,500})'"),
    "quantization": re.compile(r"\bquantization=([\w-]{1,60})"),
    "dtype": re.compile(r"\bdtype=torch\.(\w{1,20})"),
    "tensor_parallel": re.compile(r"\btensor_parallel_size=(\d{1,4})"),
    "max_model_len": re.compile(r"\bmax_seq_len=(\d{1,9})"),
    "eager": re.compile(r"\benforce_eager=(True|False)"),
    "linear_backend": re.compile(r"\blinear_backend='(\w{1,40})'"),
    "moe_backend": re.compile(r"\bmoe_backend='(\w{1,40})'"),
    "method": re.compile(r"SpeculativeConfig\(method='([\w-]{1,40})'"),
    "tokens": re.compile(r"\bnum_spec_tokens=(\d{1,4})"),
    "graph_mode": re.compile(r"'cudagraph_mode': <CUDAGraphMode\.(\w{1,40})"),
}
"""Fields of the configuration that vLLM prints when the engine starts."""
SGLANG_ARGUMENTS = re.compile(r"server_args=ServerArgs\((.*)")
SGLANG_SETTINGS = {
    "model": re.compile(r"\bmodel_path='([^']{0,500})'"),
    "quantization": re.compile(r"\bquantization='?([\w-]{1,60})"),
    "dtype": re.compile(r"\bdtype='(\w{1,20})'"),
    "tensor_parallel": re.compile(r"\btp_size=(\d{1,4})"),
    "moe_backend": re.compile(r"\bmoe_runner_backend='(\w{1,40})'"),
    "linear_backend": re.compile(r"\bfp4_gemm(?:_runner)?_backend='(\w{1,40})'"),
    "attention": re.compile(r"\battention_backend='(\w{1,40})'"),
    "method": re.compile(r"\bspeculative_algorithm='(\w{1,40})'"),
    "tokens": re.compile(r"\bspeculative_num_draft_tokens=(\d{1,4})"),
    "no_graphs": re.compile(r"\bdisable_cuda_graph=(True|False)"),
}
SGLANG_SIGNS = re.compile(r"server_args=ServerArgs\(|Load weight begin\. |The server is fired up|\bsglang\b")

STARTED = re.compile(r"init engine \(profile, create kv cache, warmup model\) took ([\d.]{1,12}) s")
SERVED = re.compile(r"^INFO:\s+Application startup complete\.")
API_SERVER = re.compile(r"Starting vLLM (?:API )?server|vLLM (?:API )?server version|^INFO:\s+Started server process")
FIRED_UP = re.compile(r"The server is fired up and ready to roll!")
LOADING = re.compile(r"Starting to load model |Load weight begin\. ")
DRAFTER = re.compile(r"Loading drafter model")
LOADED = re.compile(r"Model loading took ([\d.]{1,12}) GiB(?: memory)? and ([\d.]{1,16}) seconds")
SGLANG_LOADED = re.compile(r"Load weight end\. elapsed=([\d.]{1,12}) s.{0,400}?mem usage=([\d.]{1,12}) GB")
KV_MEMORY = re.compile(r"Available KV cache memory: ([\d.]{1,12}) GiB")
KV_TOKENS = re.compile(r"\b(?:\w{1,20}(?: \+ host)?) KV cache size: ([\d,]{1,20}) tokens")
SGLANG_KV = re.compile(r"max_total_num_tokens=(\d{1,12})")
CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]{1,14}) tokens per request: ([\d.]{1,14})x")
GRAPHS = re.compile(r"Graph capturing finished in |Capture .{1,40}?CUDA graph end|Capture cuda graph end")
ATTENTION = re.compile(r"Using (\w{1,40}) attention backend out of|Using AttentionBackendEnum\.(\w{1,40}) backend\.")
CAPABILITY = re.compile(r"compute capability(?: of)?:? \(?(\d{1,2})[.,] ?(\d)\b")
ORDERLY = re.compile(
    r"destroy_process_group\(\) was not called before program exit, which can leak resources\..{0,300}$"
    r"|^INFO:\s+Application shutdown complete\.|^INFO:\s+Finished server process"
)
"""Printed when a process ends by itself or on a signal that it heard; a killed one prints nothing."""
STOPPED = re.compile(r"^\[shutdown\] API server: shutdown triggered")
"""vLLM's API server prints it in its signal handler alone: somebody ended it."""
STOPPING = re.compile(rf"{STOPPED.pattern}|^\[shutdown\] EngineCore: trigger received signal=SIG\w{{1,8}}")
REQUEST = re.compile(
    r"\"POST /(?:v1/\w|generate|inference)[^\"]{0,200}\" 200|SpecDecoding metrics: |JIT compilation during inference: "
    r"|Avg generation throughput: (?!0\.0 )[\d.]+ tokens/s|Decode batch"
)
ACCESS = re.compile(
    r'^(?:\([\w. :-]{1,80} pid=\d{1,10}\) )?INFO:\s{1,8}\S{1,80} - "[A-Z]{3,7} [^"]{1,400} HTTP/[\d.]{1,5}" \d'
)
"""What uvicorn prints of a request."""
SPEC = re.compile(r"SpecDecoding metrics: Mean acceptance length: ([\d.]+|nan)")
SPEC_COUNTS = re.compile(r"Accepted: (\d{1,12}) tokens, Drafted: (\d{1,12}) tokens")
SPEC_RATES = re.compile(r"Per-position acceptance rate: ([\d., nan]{1,400}?), Avg")
SGLANG_SPEC = re.compile(r"Decode batch.{0,400}?accept len: ([\d.]{1,10})")


def settings(text: str, table: dict[str, re.Pattern[str]]) -> dict[str, str]:
    """The fields of one printed configuration."""
    matches = ((name, pattern.search(text)) for name, pattern in table.items())
    return {name: match[1] for name, match in matches if match}


def arguments(text: str) -> dict[str, Any]:
    """What vLLM printed as its non-default arguments, as plain JSON without secrets. {} for what is no literal."""
    if len(text) > MAX_ARGUMENTS:
        return {}
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return _plain(value) if isinstance(value, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): "***" if SECRET.search(str(k)) and v else _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def drafting(message: str, number: int) -> Drafting | None:
    """Acceptance of one interval, None where the line does not speak of it."""
    if other := SGLANG_SPEC.search(message):
        return Drafting(mean_length=_number(other[1]), rates=(), accepted=None, drafted=None, line=number)
    mean = SPEC.search(message)
    if mean is None:
        return None
    counts, rates = SPEC_COUNTS.search(message), SPEC_RATES.search(message)
    values = [_number(part.strip()) for part in rates[1].split(",")] if rates else []
    return Drafting(
        mean_length=_number(mean[1]),
        rates=tuple(value for value in values if value is not None),
        accepted=int(counts[1]) if counts else None,
        drafted=int(counts[2]) if counts else None,
        line=number,
    )


def count(text: str) -> int:
    """`19,316,864` -> 19316864"""
    return int(text.replace(",", "") or 0)


def _number(text: str) -> float | None:
    """None for what is no finite number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value else None
