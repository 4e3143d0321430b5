"""How scales and codes are chosen: the native methods, and the quantizers of others behind the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NATIVE = ("rtn", "mse", "imatrix", "gptq")
DELEGATED = ("autoround", "modelopt", "llmcompressor")
"""Methods that other people's quantizers carry out, each in a process of its own."""

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "gptq": ("correction",),
    "autoround": ("iters", "batch_rows"),
    "modelopt": ("algorithm",),
    "llmcompressor": ("modifier", "dampening"),
}
"""The options of each method; the others have none."""

Modifier = Literal["gptq", "awq", "imatrix"]
Algorithm = Literal["max", "mse", "awq_lite"]


class Method(BaseModel):
    """How scales and codes are chosen.

    rtn      the scale of the largest element, codes to nearest
    mse      the scale of least squared error
    imatrix  the same, each column weighted by the energy of its input
    gptq     codes solved against the inputs' second moments; `correction` (0 to 1) is how far the target moves towards
             the outputs of the source model: half way loses a few percent less, in twice the time
    autoround      Intel AutoRound: roundings and ranges tuned for `iters` steps a block, `batch_rows` rows a step;
                   without steps the best scales for the inputs
    modelopt       NVIDIA ModelOpt: scales by `algorithm`, of the weights alone
    llmcompressor  vLLM's llm-compressor: `modifier` gptq (with `dampening` as a share of the mean diagonal) or imatrix
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Literal["rtn", "mse", "imatrix", "gptq", "autoround", "modelopt", "llmcompressor"] = "mse"
    correction: Annotated[float, Field(ge=0, le=1)] = 0.0
    iters: Annotated[int, Field(ge=0, le=10_000)] = 200
    batch_rows: Annotated[int, Field(ge=1, le=1024)] = 8
    algorithm: Algorithm = "max"
    modifier: Modifier = "gptq"
    dampening: Annotated[float, Field(gt=0, le=1)] = 0.01

    @model_validator(mode="after")
    def _own_options(self) -> Method:
        own = OPTIONS.get(self.name, ())
        foreign = sorted(self.model_fields_set - {"name", *own})
        if foreign:
            owner = next(name for name, options in OPTIONS.items() if foreign[0] in options)
            raise ValueError(
                f"{foreign[0]!r} is an option of method {owner}; {self.name} has {', '.join(own) or 'none'}"
            )
        if "dampening" in self.model_fields_set and self.modifier != "gptq":
            raise ValueError(f"'dampening' is an option of modifier gptq, not of {self.modifier}")
        return self

    @property
    def calibrated(self) -> bool:
        """Whether it looks at calibration rows."""
        return self.name in ("imatrix", "gptq", "autoround", "llmcompressor")

    @property
    def delegated(self) -> bool:
        """Whether another quantizer carries it out."""
        return self.name in DELEGATED

    @property
    def options(self) -> dict[str, Any]:
        """Its own options with their values."""
        own = OPTIONS.get(self.name, ())
        if self.name == "llmcompressor" and self.modifier != "gptq":
            own = ("modifier",)
        return {option: getattr(self, option) for option in own}

    def as_json(self) -> dict[str, Any]:
        """Name and options, as a recipe spells them."""
        return {"name": self.name, **self.options}
