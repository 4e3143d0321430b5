"""Keep a server under varied load for a while and look again: the known faults take minutes to hours to show."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkquant.events import Listener, Said
from sparkquant.marlin.client import Client, at_once
from sparkquant.marlin.coherence import inspect
from sparkquant.marlin.keeper import descendants
from sparkquant.marlin.log import read_log_file
from sparkquant.marlin.metrics import CORRUPTED
from sparkquant.marlin.prompts import Prompts
from sparkquant.marlin.server import Server

WIDTHS = (1, 2, 4, 8)
LENGTHS = (32, 128, 256)
LAST_GROWTH = 1.2
"""Memory at the end over memory after the first quarter; more is a leak."""
SHOWN = 8


def soak(client: Client, server: Server, prompts: Prompts, seconds: float, listener: Listener) -> dict[str, Any]:
    """Serve for so many seconds; what was seen, as plain JSON. The load is the same in every run (seeded)."""
    choice = random.Random(0)
    end, began = time.monotonic() + seconds, time.monotonic()
    before = client.metrics()
    rounds = requests = tokens = 0
    broken: list[str] = []
    errors: list[str] = []
    memory: list[int] = []
    while time.monotonic() < end and server.alive and len(errors) < SHOWN and len(broken) < SHOWN:
        width, length = choice.choice(WIDTHS), choice.choice(LENGTHS)
        asks = choice.sample(prompts.asks, min(2 * width, len(prompts.asks)))
        answers = at_once(lambda ask, n=length: client.complete(ask.ids, n), asks, width)
        rounds, requests = rounds + 1, requests + len(answers)
        for answer in answers:
            tokens += answer.tokens
            if answer.error:
                errors.append(answer.error)
                continue
            found = inspect(answer.text, answer.token_ids or None, None, answer.logprobs or None)
            if any(finding.broken for finding in found):
                told = "; ".join(str(finding) for finding in found)
                broken.append(f"after {time.monotonic() - began:.0f} s, {width} at once: {told}")
        memory.append(resident_bytes(server))
        if rounds % 50 == 0:
            listener(Said(f"soak: {time.monotonic() - began:.0f} s, {requests} requests, {len(broken)} broken"))
    log = read_log_file(server.launch.log)
    early = memory[len(memory) // 4] if memory else 0
    return {
        "seconds": round(time.monotonic() - began, 1), "asked_seconds": seconds, "rounds": rounds,
        "requests": requests, "tokens": tokens, "broken": broken[:SHOWN], "errors": list(dict.fromkeys(errors))[:SHOWN],
        "corrupted_requests": client.metrics().since(before, CORRUPTED), "alive": server.alive,
        "host_bytes": [early, memory[-1] if memory else 0],
        "grown": bool(early and memory[-1] > LAST_GROWTH * early),
        "notices": [notice.text for notice in log.notices if notice.fails],
        "faults": [fault.text for fault in log.faults],
    }  # fmt: skip


def complaint(found: Mapping[str, Any]) -> str:
    """The first thing that speaks against it; "" when nothing does."""
    if not found["alive"]:
        return f"the server ended after {found['seconds']:.0f} s under load"
    for key, what in (("broken", "an answer broke"), ("errors", "a request failed"), ("faults", "a fault in the log")):
        if found[key]:
            return f"{what} under load: {found[key][0]}"
    if found["corrupted_requests"]:
        return f"the server counts {found['corrupted_requests']:.0f} corrupted requests (NaN in logits)"
    if found["notices"]:
        return f"a warning in the log: {found['notices'][0]}"
    if found["grown"]:
        return f"host memory grew from {found['host_bytes'][0]:,} to {found['host_bytes'][1]:,} bytes"
    return ""


def resident_bytes(server: Server) -> int:
    """Host memory of the server and all of its descendants; on unified memory that is the GPU's as well."""
    if server.process is None:
        return 0
    total = 0
    for pid in descendants(server.process.pid):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        except (OSError, IndexError, ValueError):
            continue
    return total
