"""How a version of vLLM is told to do something: options and environment variables, as data.

Sources: `vllm/config/kernel.py`, `vllm/model_executor/kernels/linear/__init__.py` and `vllm/envs.py` of the wheels of
0.25.1 and 0.33.0.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

ATOMIC_ADD = "VLLM_MARLIN_USE_ATOMIC_ADD"

BEFORE_MARLIN = ("CutlassW4A8LinearKernel", "MacheteLinearKernel", "AllSparkLinearKernel")
"""Kernels that the automatic choice tries before Marlin for packed integers, up to 0.32."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run adds to the command line and to the environment of a server."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: Settings) -> Settings:
        return Settings((*self.arguments, *other.arguments), {**self.environment, **other.environment})


@dataclass(frozen=True, slots=True)
class Dialect:
    """The spelling of one range of versions.

    per_scheme  a backend can be named for each scheme; otherwise `--linear-backend` is for all layers, and strict
    """

    per_scheme: Mapping[str, str] = field(default_factory=dict)

    def marlin(self, schemes: Collection[str], experts: Collection[str]) -> Settings:
        """Marlin for every scheme that it is for (`int`, `nvfp4`), FP8 left to the engine.

        schemes  of dense layers; experts  of experts; both as logs call them
        """
        wanted = [scheme for scheme in ("int", "nvfp4") if scheme in schemes]
        found = Settings(("--moe-backend", "marlin")) if {"int", "nvfp4"} & set(experts) else Settings()
        if not wanted:
            return found
        if self.per_scheme:
            table = {self.per_scheme[scheme]: "marlin" for scheme in wanted}
            return found + Settings(("--kernel-config", json.dumps({"linear_backend_per_quant": table})))
        if set(schemes) <= {"int", "nvfp4"}:
            return found + Settings(("--linear-backend", "marlin"))
        # The option is for all layers and refuses FP8 on 8.9 and newer. Weight-only NVFP4 is Marlin's by itself.
        return found + Settings(environment={"VLLM_DISABLED_KERNELS": ",".join(BEFORE_MARLIN)})

    def other(self, schemes: Collection[str], experts: Collection[str]) -> Settings | None:
        """Another kernel on the same weights; None where none is known to take them.

        Weight-only NVFP4 has no other dense kernel without the humming package: emulation quantizes the activations,
        too, and asks for a scale that these checkpoints do not have.
        """
        found = Settings()
        if "int" in schemes:
            found += Settings(environment={"VLLM_DISABLED_KERNELS": "MarlinLinearKernel"})
        if "int" in experts:
            found += Settings(("--moe-backend", "triton"))
        elif "nvfp4" in experts:
            found += Settings(("--moe-backend", "emulation"))
        return found if found != Settings() else None

    @staticmethod
    def eager() -> Settings:
        """No CUDA graphs, no compiler."""
        return Settings(("--enforce-eager",))

    @staticmethod
    def drafting(tokens: int) -> Settings:
        """Speculation with the checkpoint's own draft head."""
        return Settings(("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": tokens})))

    @staticmethod
    def atomic_add(on: bool) -> Settings:
        """Partial sums by atomics in narrow dense Marlin layers; only "1" counts as on."""
        return Settings(environment={ATOMIC_ADD: "1" if on else "0"})


_OLD = Dialect()
DIALECTS: Mapping[str, Dialect] = {
    "0.25": _OLD,
    "0.26": _OLD,
    "0.33": Dialect({"int": "mixed_precision", "nvfp4": "nvfp4_w4a16"}),
}
"""By the version whose rules apply (`engine.versions`)."""
