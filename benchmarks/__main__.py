"""`python -m benchmarks [NAME ...]`: run benchmarks and print their tables; results are kept in bench-out/."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

NAMES = ("data_free", "calibrated", "backends", "verify", "cold_plan")
MODULES = {"verify": "verify_speed"}


def main() -> None:
    """Run the named benchmarks, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--work", type=Path, default=Path("bench-out"), help="where checkpoints and results are kept")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or NAMES:
        importlib.import_module(f"benchmarks.{MODULES.get(name, name)}").main(arguments.work.resolve())


if __name__ == "__main__":
    main()
