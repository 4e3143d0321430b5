"""Tables (parquet, JSONL with other columns) and hub data sets, read row by row through the package `datasets`.

Streamed: the package would otherwise copy every text into its own cache, where it outlives the run.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparkquant.calibration.conversation import Dropped, Item, Reason, Unusable
from sparkquant.calibration.dialects import item_of
from sparkquant.calibration.mix import Columns, Source
from sparkquant.errors import CalibrationError, EnvironmentMissing

INSTALL = 'pip install "sparkquant[datasets]"'
BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv"}


def read_table(name: str, source: Source, files: list[Path]) -> Iterator[Item | Dropped]:
    """Every row of a table source, at most `limit`."""
    stream = _stream(name, source, files)
    columns = source.columns or Columns()
    checked = False
    try:
        for number, row in enumerate(itertools.islice(stream, source.limit), 1):
            if not checked:
                _demand_columns(name, columns, row)
                checked = True
            yield _item(row, columns, f"{name}[{number}]")
    except OSError as error:
        raise EnvironmentMissing(
            f"source {name!r} cannot be read to its end: {str(error).partition(chr(10))[0]}",
            hint="check the connection, or download the data set and name its files under `table:`",
        ) from None


def _stream(name: str, source: Source, files: list[Path]) -> Any:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise EnvironmentMissing(f"source {name!r} needs the package `datasets`", hint=INSTALL) from None
    try:
        if source.hub:
            return datasets.load_dataset(
                source.hub, source.config, split=source.split, revision=source.revision, streaming=True
            )
        kinds = {BUILDERS.get(path.suffix) for path in files}
        if len(kinds) != 1 or None in kinds:
            known = ", ".join(BUILDERS)
            raise CalibrationError(
                f"source {name!r}: {', '.join(sorted({path.suffix or path.name for path in files}))} is no one table",
                hint=f"name files of one kind ({known})",
            )
        paths = [str(path) for path in files]
        return datasets.load_dataset(kinds.pop(), data_files=paths, split="train", streaming=True)
    except (OSError, ValueError) as error:
        # Missing data sets, unreachable hubs and unreadable files all come as one of these two.
        first = str(error).partition("\n")[0]
        if source.hub and (isinstance(error, ConnectionError) or os.environ.get("HF_HUB_OFFLINE")):
            raise EnvironmentMissing(
                f"source {name!r}: {source.hub} cannot be reached: {first}",
                hint="go online, or download the data set and name its files under `table:`",
            ) from None
        raise CalibrationError(f"source {name!r}: {first}", hint="check id, config and split, or the files") from None


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
