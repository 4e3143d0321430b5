"""Tables through the package `datasets`: columns as declared, no copy left behind, a clear word when it is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkquant.calibration.conversation import Conversation, Dropped, Item, Passage
from sparkquant.errors import CalibrationError, EnvironmentMissing
from tests.calibration.conftest import agent, chat, write_jsonl
from tests.calibration.test_reading import mix_of, read

RECORDS: list[dict[str, Any]] = [
    {"chat": chat(1)["messages"], "lang": "en"},
    {"chat": agent(2)["messages"], "lang": "de"},
]


def test_missing_package_names_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentMissing) as caught:
        read(tmp_path, table="a.jsonl", columns={"messages": "chat"})
    assert caught.value.hint == 'pip install "sparkquant[datasets]"'


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def parquet(datasets: Any, path: Path, records: list[dict[str, Any]]) -> None:
    datasets.Dataset.from_list(records).to_parquet(str(path))


@pytest.mark.usefixtures("datasets")
def test_messages_of_jsonl_and_parquet(datasets: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{**r, "chat": chat(n)["messages"]} for n, r in enumerate(RECORDS)])
    parquet(datasets, tmp_path / "a.parquet", RECORDS)
    for name in ("a.jsonl", "a.parquet"):
        found = read(tmp_path, table=name, columns={"messages": "chat", "language": "lang"})
        assert [item.where for item in found] == ["s[1]", "s[2]"]
        conversations = [item for item in found if isinstance(item, Conversation)]
        assert [item.language for item in conversations] == ["en", "de"]
    call = conversations[1].messages[2]["tool_calls"][0]["function"]
    assert call == {"name": "weather", "arguments": {"city": 'City 2-0 "quoted"\n'}}
    assert not any((tmp_path / "cache").rglob("*.arrow"))


@pytest.mark.usefixtures("datasets")
def test_text_and_exchanges_and_limit(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"q": f"Q{n}", "a": f"A{n}", "t": f"T{n}"} for n in range(5)])
    exchanges: list[Item | Dropped] = read(tmp_path, table="a.jsonl", columns={"user": "q", "assistant": "a"}, limit=3)
    assert len(exchanges) == 3
    assert isinstance(exchanges[0], Conversation)
    assert [m["content"] for m in exchanges[0].messages] == ["Q0", "A0"]
    (first, *_) = read(tmp_path, table="a.jsonl", columns={"text": "t"})
    assert isinstance(first, Passage)
    assert first.text == "T0"


@pytest.mark.usefixtures("datasets")
def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(CalibrationError, match="no column 'chats'") as caught:
        read(tmp_path, table="a.jsonl", columns={"messages": "chats"})
    assert caught.value.hint == "columns: chat, lang"


@pytest.mark.usefixtures("datasets")
def test_files_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    (tmp_path / "c.jsonl").write_text('{"chat": []}\n{broken')
    with pytest.raises(CalibrationError):
        read(tmp_path, table="c.jsonl", columns={"messages": "chat"})
    (tmp_path / "b.xlsx").write_bytes(b"")
    with pytest.raises(CalibrationError):
        read(tmp_path, table="a.parquet", columns={"messages": "chat"})
    with pytest.raises(CalibrationError, match="no one table"):
        read(tmp_path, table=["a.parquet", "b.xlsx"], columns={"messages": "chat"})


@pytest.mark.usefixtures("datasets")
def test_a_hub_set_out_of_reach_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    mix = mix_of(tmp_path, hub="nobody/nothing", columns={"messages": "chat"})
    with pytest.raises(EnvironmentMissing, match="cannot be reached"):
        read(tmp_path, **json.loads(mix.sources["s"].model_dump_json(include={"hub", "columns"}, exclude_none=True)))
