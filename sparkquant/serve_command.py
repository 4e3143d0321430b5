"""The command that serves a result: the environment, and the flags that this checkpoint needs and no others."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

ENVIRONMENT = "VLLM_MARLIN_USE_ATOMIC_ADD=1"
DRAFTS = 2
"""Tokens drafted at once. One draft block is applied repeatedly; what each position is worth, `evaluate` measures."""


def serve_flags(config: Mapping[str, Any], totals: Mapping[str, Any]) -> list[str]:
    """Flags of `vllm serve` by config.json and the totals of plan.json.

    --speculative-config  the checkpoint holds a draft head: without the flag the engine reads past it
    --trust-remote-code   the model's classes are Python files of the checkpoint
    """
    flags: list[str] = []
    if totals.get("draft_head_tensors"):
        settings = {"method": "mtp", "num_speculative_tokens": DRAFTS}
        flags += ["--speculative-config", json.dumps(settings, separators=(",", ":"))]
    if isinstance(config.get("auto_map"), Mapping):
        flags.append("--trust-remote-code")
    return flags


def serve_command(target: str, config: Mapping[str, Any], totals: Mapping[str, Any]) -> str:
    """The whole line; `target`, a folder or a hub id, is a word of the shell already."""
    return " ".join([ENVIRONMENT, "vllm", "serve", target, *map(shlex.quote, serve_flags(config, totals))])
