"""The checkpoint's own template decides; what it cannot render or silently leaves out is found, per row."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparkquant.calibration.template as template_module
from sparkquant.calibration.conversation import Conversation, Reason, Unusable
from sparkquant.calibration.dialects import item_of
from sparkquant.calibration.losses import LossFinder
from sparkquant.calibration.rows import RowMaker
from sparkquant.calibration.template import ChatTemplate, tokenizer_digest
from sparkquant.errors import CalibrationError, CheckpointError, EnvironmentMissing
from tests.calibration.conftest import agent, chat

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
PLAIN = TURNS + "{{ m.content }}<|im_end|>\n{% endfor %}"
WithTemplate = Callable[[str], Path]


def conversation(record: dict[str, Any]) -> Conversation:
    item = item_of(record, "x:1")
    assert isinstance(item, Conversation)
    return item


def rendered(folder: Path, record: dict[str, Any]) -> str:
    item = conversation(record)
    return LossFinder(ChatTemplate.open(folder)).render(item, item.messages)


def refused(folder: Path, record: dict[str, Any]) -> Reason:
    with pytest.raises(Unusable) as caught:
        rendered(folder, record)
    return caught.value.reason


def test_the_example_template_renders_tools_reasoning_and_null_content(model: Path) -> None:
    text = rendered(model, agent(1))
    for part in ("Weather of a city", "<think>\nLook up 0\n</think>", '"name": "weather"', "rain 1-2", "Done 1"):
        assert part in text


def test_the_thinking_flag_reaches_the_generation_prompt(template: ChatTemplate) -> None:
    ask = ({"role": "user", "content": "Hi"},)
    assert template.render(ask, (), {"enable_thinking": True}).endswith("<think>\n")
    assert template.render(ask, (), {"enable_thinking": False}).endswith("</think>\n\n")
    assert template.thinking


def test_other_families_call_the_flag_thinking(with_template: WithTemplate) -> None:
    template = ChatTemplate.open(with_template("{{ 'ON' if thinking else 'OFF' }}{{ messages[0].content }}"))
    ask = ({"role": "user", "content": "Hi"},)
    assert template.render(ask, (), {"enable_thinking": True}) == "ONHi"


def test_a_template_that_does_not_know_tools_loses_the_row(with_template: WithTemplate) -> None:
    folder = with_template(PLAIN)
    record = {**chat(1), "tools": agent(1)["tools"]}
    assert refused(folder, record) is Reason.TOOLS_LOST
    assert "Answer 1" in rendered(folder, chat(1))


def test_tool_names_in_calls_are_no_tool_definitions(with_template: WithTemplate) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    text = TURNS + "{{ m.reasoning_content }}{{ m.content or '' }}" + calls + "<|im_end|>\n{% endfor %}"
    assert refused(with_template(text), agent(1)) is Reason.TOOLS_LOST


def test_a_template_that_prints_only_the_names_of_called_tools(with_template: WithTemplate) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    head = "{{ tools | tojson }}"
    text = head + TURNS + "{{ m.reasoning_content }}{{ m.content or '' }}" + calls + "<|im_end|>\n{% endfor %}"
    assert refused(with_template(text), agent(1)) is Reason.TOOL_CALL_LOST


OWN_QUOTES = """replace("'", "\\\\'") | replace("\\n", "\\\\n")"""


@pytest.mark.parametrize(
    "arguments", ["tojson", "string", "tojson(ensure_ascii=True)", f"items | map('last') | join | {OWN_QUOTES}"]
)
def test_arguments_are_found_in_any_spelling(with_template: WithTemplate, arguments: str) -> None:
    calls = (
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | "
        + arguments
        + " }}{% endfor %}"
    )
    head = "{{ tools | tojson }}"
    text = head + TURNS + "{{ m.reasoning_content }}{{ m.content or '' }}" + calls + "<|im_end|>\n{% endfor %}"
    assert "weather" in rendered(with_template(text), agent(1))


def test_null_content_that_makes_a_template_raise(with_template: WithTemplate) -> None:
    text = "{{ tools | tojson }}" + TURNS + "{{ m.content + '' }}{{ m.reasoning_content }}"
    text += "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n{% endfor %}"
    assert refused(with_template(text), agent(1)) is Reason.NULL_CONTENT


def test_null_content_that_a_template_prints_as_a_word(with_template: WithTemplate) -> None:
    text = "{{ tools | tojson }}" + TURNS + "{{ m.content }}{{ m.reasoning_content }}"
    text += "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n{% endfor %}"
    assert refused(with_template(text), agent(1)) is Reason.NULL_CONTENT


def test_a_template_that_drops_reasoning(with_template: WithTemplate) -> None:
    folder = with_template(PLAIN)
    assert refused(folder, chat(1, reasoning="Think")) is Reason.REASONING_LOST


def test_reasoning_of_earlier_turns_may_be_left_out_but_not_that_of_the_last(with_template: WithTemplate) -> None:
    last_only = TURNS + (
        "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    folder = with_template(last_only)
    text = rendered(folder, chat(1, reasoning="Think", turns=2))
    assert "Think 1.1" in text
    assert "Think 1.0" not in text
    early = chat(1, turns=2)
    early["messages"][1]["reasoning_content"] = "Only the first turn thinks"
    assert "Only the first" not in rendered(folder, early)


def test_a_template_that_leaves_out_a_message(with_template: WithTemplate) -> None:
    assert refused(with_template("{{ messages[-1].content }}"), chat(1)) is Reason.CONTENT_LOST


def test_a_template_that_raises_is_a_reason(with_template: WithTemplate) -> None:
    folder = with_template("{{ raise_exception('Roles must alternate') }}")
    assert refused(folder, chat(1)) is Reason.TEMPLATE_FAILS


@pytest.mark.parametrize(
    "text",
    [
        "{% if %}",
        "{{ messages.nothing.more }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'config.json' %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}{{ messages[0].content }}",
    ],
)
def test_hostile_templates_stay_in_the_sandbox(with_template: WithTemplate, text: str) -> None:
    assert refused(with_template(text), chat(1)) in (Reason.TEMPLATE_FAILS, Reason.CONTENT_LOST, Reason.EMPTY)


def test_a_template_without_end_is_stopped(with_template: WithTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "SECONDS", 0.2)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate.open(with_template(loop))
    ask = ({"role": "user", "content": "Hi"},)
    for _ in range(2):
        with pytest.raises(Unusable) as caught:
            template.render(ask)
        assert caught.value.reason is Reason.TEMPLATE_TOO_SLOW
    with pytest.raises(CalibrationError, match="did not finish"):
        template.render(ask)


def test_requests_cannot_set_arguments_of_transformers(template: ChatTemplate) -> None:
    ask = ({"role": "user", "content": "Hi"},)
    options = {"chat_template": "gone", "tokenize": True, "add_generation_prompt": False, "documents": "x"}
    assert template.render(ask, (), options) == template.render(ask)


def test_templates_that_print_the_date_give_the_same_rows_every_day(with_template: WithTemplate) -> None:
    template = ChatTemplate.open(with_template("{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"))
    assert template.render(({"role": "user", "content": "Hi"},)) == "2026-01-01 Hi"


def test_named_templates_are_chosen_by_tools(with_template: WithTemplate) -> None:
    folder = with_template(PLAIN)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    with_tools = "{{ tools | tojson }}" + PLAIN
    config["chat_template"] = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": with_tools}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.open(folder)
    item = conversation({**chat(1), "tools": agent(1)["tools"]})
    assert "Weather of a city" in LossFinder(template).render(item, item.messages)
    assert len(template.digest) == 64


def test_no_template_is_a_reason_for_conversations_only(with_template: WithTemplate) -> None:
    folder = with_template("")
    (folder / "chat_template.jinja").unlink()
    template = ChatTemplate.open(folder)
    assert template.digest == ""
    with pytest.raises(Unusable) as caught:
        template.render(({"role": "user", "content": "Hi"},))
    assert caught.value.reason is Reason.NO_TEMPLATE
    text = item_of({"text": "plain text\nof two lines"}, "x:1")
    (row,) = RowMaker(template, 64).rows(text)
    assert template.decode(row.ids) == "plain text\nof two lines"


def test_a_processor_template_serves_older_multimodal_checkpoints(with_template: WithTemplate) -> None:
    folder = with_template("")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert "Answer 1" in rendered(folder, chat(1))


def test_tokenizer_faults_are_checkpoint_errors(with_template: WithTemplate, tmp_path: Path) -> None:
    folder = with_template(PLAIN)
    before = tokenizer_digest(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_digest(folder) != before
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        ChatTemplate.open(folder)
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        ChatTemplate.open(tmp_path)


def test_code_in_a_checkpoint_is_not_run(with_template: WithTemplate, tmp_path: Path) -> None:
    folder = with_template(PLAIN)
    proof = tmp_path / "it-ran"
    (folder / "tokenization_evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with contextlib.suppress(CheckpointError):  # where tokenizer.json suffices, the class is not needed
        ChatTemplate.open(folder)
    assert not proof.exists()


def test_transformers_missing_is_told_with_the_install_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(EnvironmentMissing) as caught:
        ChatTemplate.open(model)
    assert caught.value.hint == 'pip install "sparkquant[calibration]"'
