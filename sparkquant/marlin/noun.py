"""The base of every value of this package."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Noun(BaseModel):
    """Frozen, and strict about names; `model_dump(mode="json")` is its stable form."""

    model_config = ConfigDict(frozen=True, extra="forbid")
