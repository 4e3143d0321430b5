"""The checkpoint's own chat template and tokenizer: messages to text to ids. Never the network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sparkquant.calibration.conversation import Message, Option, Reason, Unusable, canonical
from sparkquant.calibration.time_limit import OutOfTime, TimeLimit
from sparkquant.errors import CalibrationError, CheckpointError, EnvironmentMissing

INSTALL = 'pip install "sparkquant[calibration]"'
SECONDS = 20.0
"""A real template takes milliseconds, even for a conversation of a million characters."""

PATIENCE = 3
"""After so many conversations that ran out of time, the template is at fault, not the conversation."""

TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "spiece.model", "tiktoken.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
    "vocab.txt",
)  # fmt: skip

RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "padding",
    "continue_final_message", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
    "return_assistant_tokens_mask", "strftime_now", "raise_exception", "self",
})  # fmt: skip
"""Arguments of transformers itself: a logged request must not be able to set them."""


def _fixed_day(form: str) -> str:
    """Templates that print today's date would make other rows every day."""
    return datetime(2026, 1, 1).strftime(form)


@dataclass
class ChatTemplate:
    """Renders and tokenizes with the files of one checkpoint folder. `text` is "" when there is no template."""

    folder: Path
    text: str
    digest: str
    tokenizer_digest: str
    _tokenizer: Any = field(repr=False)
    _slow: int = 0

    @classmethod
    def open(cls, folder: Path) -> ChatTemplate:
        """Load the tokenizer; EnvironmentMissing without transformers, CheckpointError when the files cannot serve."""
        tokenizer = _load_tokenizer(folder)
        templates = getattr(tokenizer, "chat_template", None) or _processor_template(folder)
        tokenizer.chat_template = templates
        text = "\n".join(str(t) for _, t in sorted(templates.items())) if isinstance(templates, dict) else templates
        digest = hashlib.sha256(canonical(templates)).hexdigest() if templates else ""
        return cls(folder, text or "", digest, tokenizer_digest(folder), tokenizer)

    @property
    def thinking(self) -> bool:
        """The model was made to think: its template knows reasoning."""
        return any(word in self.text for word in ("enable_thinking", "reasoning", "<think>"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Option] | None = None,
    ) -> str:
        """The text that a server would put before the model; Unusable when the template fails or takes too long.

        A conversation that ends with a question gets the generation prompt: its answer would start there.
        """
        if not self.text:
            raise Unusable(Reason.NO_TEMPLATE, "the checkpoint has no chat template")
        given = {key: value for key, value in (options or {}).items() if key not in RESERVED}
        if "enable_thinking" in given:
            given.setdefault("thinking", given["enable_thinking"])  # what other families call the same flag
        prompt = messages[-1]["role"] != "assistant"
        try:
            with TimeLimit(SECONDS):
                text = self._tokenizer.apply_chat_template(
                    [_for_template(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    strftime_now=_fixed_day,
                    **given,
                )
        except OutOfTime:
            self._slow += 1
            if self._slow >= PATIENCE:
                raise CalibrationError(
                    f"the chat template of {self.folder} did not finish within {SECONDS:g} s, {PATIENCE} times",
                    hint="look at its loops, or calibrate with `text` sources, which need no template",
                ) from None
            raise Unusable(Reason.TEMPLATE_TOO_SLOW, f"not rendered within {SECONDS:g} s") from None
        except ImportError as error:
            raise EnvironmentMissing(str(error).partition("\n")[0], hint=INSTALL) from None
        except Exception as error:  # a template is a program from somewhere: it may raise anything
            raise Unusable(Reason.TEMPLATE_FAILS, f"{type(error).__name__}: {str(error)[:200]}") from None
        if not isinstance(text, str) or not text.strip():
            raise Unusable(Reason.EMPTY, "the template renders it as nothing")
        return text

    def ids(self, text: str, *, plain: bool = False) -> tuple[int, ...]:
        """Token ids. `plain` text gets the tokens that the model wants around it; a template writes them itself."""
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=plain, verbose=False))
        except (UnicodeEncodeError, TypeError):
            raise Unusable(Reason.LONE_SURROGATE, "the tokenizer does not take this text") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a row as the model sees it, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _for_template(message: Message) -> dict[str, Any]:
    """A copy that the template cannot harm; some families read `reasoning`, most `reasoning_content`."""
    copy: dict[str, Any] = json.loads(json.dumps(message))
    if "reasoning_content" in copy:
        copy["reasoning"] = copy["reasoning_content"]
    return copy


def _load_tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise EnvironmentMissing("calibration with conversations needs transformers", hint=INSTALL) from None
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder}: no tokenizer files", hint="copy tokenizer.json and tokenizer_config.json there"
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises anything from KeyError to OSError for faulty files
        first = str(error).partition("\n")[0][:200]
        hint = "fetch the tokenizer files again; code inside checkpoints is never run, pass ready rows of ids instead"
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {first}", hint=hint) from None


def _processor_template(folder: Path) -> str | None:
    """Older multimodal checkpoints keep the template beside their processor."""
    path = folder / "chat_template.json"
    try:
        template = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return template if isinstance(template, str) else None


def tokenizer_digest(folder: Path) -> str:
    """sha256 over the tokenizer files, names and bytes."""
    state = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            state.update(name.encode() + b"\0" + hashlib.sha256((folder / name).read_bytes()).digest())
    return state.hexdigest()
