"""Tables (parquet, JSONL with other columns) and hub data sets, read row by row through the package `datasets`.

Streamed: the package would otherwise copy every text into its own cache, where it outlives the run.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkquant.calibration.conversation import Dropped, Item, Reason, Unusable
from sparkquant.calibration.dialects import item_of
from sparkquant.calibration.mix import Columns, Source
from sparkquant.errors import CalibrationError, EnvironmentMissing, SparkquantError

INSTALL = 'pip install "sparkquant[datasets]"'
BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}


def read_table(name: str, source: Source, files: list[Path]) -> Iterator[Item | Dropped]:
    """Every row of a table source, at most `limit`."""
    columns = source.columns or Columns()
    number = 0
    rows = itertools.islice(_stream(name, source, files), source.limit)
    while (row := _next(name, source, rows)) is not None:
        number += 1
        if number == 1:
            _demand_columns(name, columns, row)
        yield _item(row, columns, f"{name}[{number}]")


def _stream(name: str, source: Source, files: list[Path]) -> Iterator[Mapping[str, Any]]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise EnvironmentMissing(f"source {name!r} needs the package `datasets`", hint=INSTALL) from None
    if source.hub:
        where: dict[str, Any] = {"name": source.config, "split": source.split, "revision": source.revision}
        return _opened(name, source, lambda: datasets.load_dataset(source.hub, streaming=True, **where))
    kinds = {BUILDERS.get(path.suffix) for path in files}
    if len(kinds) != 1 or None in kinds:
        found = ", ".join(sorted({path.suffix or path.name for path in files}))
        hint = f"name files of one kind ({', '.join(BUILDERS)})"
        raise CalibrationError(f"source {name!r}: {found} is no one table", hint=hint)
    where = {"data_files": [str(path) for path in files], "split": "train"}
    return _opened(name, source, lambda: datasets.load_dataset(kinds.pop(), streaming=True, **where))


def _opened(name: str, source: Source, load: Callable[[], Any]) -> Iterator[Mapping[str, Any]]:
    try:
        return iter(load())
    except Exception as error:  # the package passes on what pyarrow, fsspec and httpx raise
        raise _unreadable(name, source, error) from None


def _next(name: str, source: Source, rows: Iterator[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    try:
        return next(rows, None)
    except Exception as error:  # as above
        raise _unreadable(name, source, error) from None


def _unreadable(name: str, source: Source, error: Exception) -> SparkquantError:
    first = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    network = isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.startswith("http")
    if source.hub and (network or os.environ.get("HF_HUB_OFFLINE")):
        hint = "go online, or download the data set and name its files under `table:`"
        return EnvironmentMissing(f"source {name!r}: {source.hub} cannot be reached: {first}", hint=hint)
    return CalibrationError(f"source {name!r}: {first}", hint="check id, config and split, or the files")


def _demand_columns(name: str, columns: Columns, row: Mapping[str, Any]) -> None:
    declared = columns.model_dump(exclude_none=True)
    missing = sorted(column for column in declared.values() if column not in row)
    if missing:
        raise CalibrationError(
            f"source {name!r} has no column {', '.join(map(repr, missing))}", hint=f"columns: {', '.join(sorted(row))}"
        )


def _item(row: Mapping[str, Any], columns: Columns, where: str) -> Item | Dropped:
    declared = columns.model_dump(exclude_none=True)
    record: dict[str, Any] = {key: _without_nulls(row.get(column)) for key, column in declared.items()}
    if "user" in record:
        exchange = (("user", record.pop("user")), ("assistant", record.pop("assistant")))
        record["messages"] = [{"role": role, "content": content} for role, content in exchange]
    try:
        return item_of(record, where)
    except Unusable as fault:
        return Dropped(where, fault.reason, fault.what)
    except RecursionError:
        return Dropped(where, Reason.NOT_A_CONVERSATION, "nested too deeply")


def _without_nulls(value: Any) -> Any:
    """Columnar files give every object all keys of the column, null where a row had none: those are taken out again."""
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return value
