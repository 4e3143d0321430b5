"""`Accept`: the limits that a result must keep, as a recipe states them; nats per token, and absolute drops."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Nats = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Accept(BaseModel):
    """Limits that the measured quality must keep: of `evaluate` and of `validate`.

    control_kl       between two runs of the same weights on one engine (validate only): another kernel, eager, atomic
                     adds off. Without it a default applies (`sparkquant.marlin.thresholds`)
    length_growth    how much longer answers may be than the reference's on average, as a share of them (validate only)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kl_mean: Nats | None = None
    kl_p99: Nats | None = None
    top1_drop: Share | None = None
    mtp_acceptance_drop: Share | None = None
    control_kl: Nats | None = None
    length_growth: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
