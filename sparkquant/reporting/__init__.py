"""Reports that people look at: one page, one Markdown text or one JSON document from a checkpoint and its evidence.

text = report_on(["Qwen3.5-27B-W4A16"], form="html")

contents.py  bytes and schemes from headers        measured.py  results of verbs, checked
sheet.py     everything of one checkpoint          document.py  sections, charts and tables
charts*.py   drawings                              page.py, markdown.py  how it looks
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sparkquant.errors import UsageError
from sparkquant.events import Listener, ignore

__all__ = ["FORMS", "report_on"]

FORMS = ("html", "md", "json")


def report_on(folders: Sequence[str | os.PathLike[str]], *, form: str = "html", listener: Listener = ignore) -> str:
    """A report on one checkpoint, or on several compared with the first. The same folders give the same bytes.

    Numbers come from the records in `sparkquant/evidence` that are about the files as they are now, and from headers;
    what was not measured is named, with the command that measures it.
    Raises UsageError for an unknown form, CheckpointError for a folder that cannot be read, EnvironmentMissing where
    the packages of `sparkquant[report]` are absent.
    """
    from sparkquant.reporting.document import document_of
    from sparkquant.reporting.markdown import markdown
    from sparkquant.reporting.page import html
    from sparkquant.reporting.sheet import sheets_of, to_json

    if form not in FORMS:
        raise UsageError(f"no form {form!r}", hint=f"one of {', '.join(FORMS)}")
    if isinstance(folders, str | os.PathLike) or not folders:
        raise UsageError("a report is about one folder or more, in a list", hint="pass ['OUT']")
    sheets = sheets_of(folders, listener=listener)
    if form == "json":
        return to_json(sheets)
    document = document_of(sheets, draw=form == "html")
    return html(document) if form == "html" else markdown(document)
