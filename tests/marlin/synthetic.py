"""Logs put together from the lines that each version prints, around the start-up of a recorded one."""

from __future__ import annotations

from pathlib import Path

LOGS = Path(__file__).parent / "logs"
GOOD = ("marlin-mtp", "mixed-nvfp4-fp8", "mixed-nvfp4-fp8-mtp", "mlp-only-nvfp4")
"""Recorded runs in which Marlin ran where it could, and that ended in order."""


def recorded(name: str) -> str:
    """A log of vLLM 0.25.1 on one H200."""
    return (LOGS / f"vllm-0.25.1-h200-{name}.log").read_text(encoding="utf-8")


CONFIG = (
    "Initializing a V1 LLM engine (v{version}) with config: model='CKPT/m', speculative_config={spec},"
    " tokenizer='CKPT/m', dtype=torch.bfloat16, max_seq_len=4096, tensor_parallel_size=1, quantization={quantization},"
    " enforce_eager={eager}, kernel_config=KernelConfig(moe_backend='{moe}', linear_backend='{linear}')"
)


class Dialect:
    """How one version prefixes and spells its lines."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.new = version.startswith("0.33")

    def line(self, message: str, level: str = "INFO", file: str = "core.py") -> str:
        """One message; 0.33 always names the process."""
        return f"{'(EngineCore pid=4711) ' if self.new else ''}{level} 11-30 21:11:10 [{file}:114] {message}\n"

    def start(
        self,
        *kernels: str,
        linear: str = "auto",
        moe: str = "auto",
        eager: bool = True,
        spec: str = "None",
        quantization: str = "compressed-tensors",
    ) -> list[str]:
        """A start-up with some lines while the model loads."""
        config = CONFIG.format(
            version=self.version, spec=spec, eager=eager, moe=moe, linear=linear, quantization=quantization
        )
        arguments = {"model": "CKPT/m", "enforce_eager": eager, "linear_backend": linear}
        cache = "GPU KV cache size: 1,234,567 tokens"
        room = "Maximum concurrency for 4,096 tokens per request: 301.41x"
        return [
            self.line(f"non-default args: {arguments}", file="api_utils.py"),
            self.line(config),
            self.line("Starting to load model CKPT/m...", file="gpu_model_runner.py"),
            *(kernel if kernel.endswith("\n") else self.line(kernel, file="loading.py") for kernel in kernels),
            self.line(f"Model loading took 12.5 GiB{'' if self.new else ' memory'} and 3.250000 seconds"),
            self.line("Available KV cache memory: 41.3 GiB", file="gpu_worker.py"),
            *([self.line(f"{cache}, {room}")] if self.new else [self.line(cache), self.line(room)]),
            *([] if eager else [self.line("Graph capturing finished in 9 secs, took 0.42 GiB")]),
            self.line("init engine (profile, create kv cache, warmup model) took 13.07 s"),
        ]

    def served(self) -> str:
        """A request that was answered."""
        return self.line(
            "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 42.5 tokens/s, Running: 1"
            " reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%", file="loggers.py",
        )  # fmt: skip

    def end(self) -> str:
        """The last line of a process that was not killed."""
        return (
            "[rank0]:[W1130 21:12:07.498 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not"
            " called before program exit, which can leak resources. For more info, please see the documentation\n"
        )

    def run(self, *kernels: str, **settings: object) -> str:
        """A whole run without a fault."""
        return "".join([*self.start(*kernels, **settings), self.served(), self.end()])  # type: ignore[arg-type]

    def crash(self, exception: str, *frames: tuple[str, int, str], raw: bool = False) -> list[str]:
        """A traceback, as the engine logs it or as Python prints it."""
        lines = ["Traceback (most recent call last):"]
        for file, number, name in frames:
            lines += [f'  File "{file}", line {number}, in {name}', "    something()"]
        lines.append(exception)
        prefix = "(EngineCore pid=4711) "
        return [f"{prefix}{line}\n" if raw else self.line(line, "ERROR") for line in lines]


OLD, NEW = Dialect("0.25.1"), Dialect("0.33.0")
