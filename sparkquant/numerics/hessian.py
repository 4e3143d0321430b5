"""What calibration learns about the inputs of Linears that share them: second moments, and their factors.

With inputs x of the model quantized so far, and inputs y at the same place of the source model, a Linear W that becomes
Q changes its output by Q x - W y. Summed over tokens the square of that is, but for a constant,
(Q - T) H (Q - T)' with H = sum x x' and T = W (sum y x') / H: GPTQ (Frantar et al. 2022, arXiv 2210.17323) solves it
with T = W, and GPTAQ (Li et al. 2025, arXiv 2504.02692) and Qronos (Zhang et al. 2025, arXiv 2505.11695) aim at y.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.3
"""Share of the mean diagonal that is added to it; 0.01 is usual, 0.1 to 1 gave a lower KL on a trained hybrid."""
CORRECTION = 0.5
"""How far the target moves towards the source model's outputs; all the way gave a higher KL than half."""

_OUTLIERS = 4.0  # the mean counts for at most so many medians: a few huge inputs must not damp all others away
_ESCALATIONS = 8
_STRIP = 256  # columns of a symmetric product that are computed at once: half of it is its mirror image


class Hessian:
    """Sums over tokens for one fusion group of K inputs, in float32.

    lower   [K, K] sum of x x', of which only the lower triangle counts; `moment` is the whole
    cross   [K, K] sum of y x', with y the source model's inputs; None until `add` gets them
    tokens  how many
    """

    def __init__(self, columns: int, *, device: torch.device | str = "cpu") -> None:
        self.lower = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self.cross: Tensor | None = None
        self.tokens = 0

    @property
    def columns(self) -> int:
        """K."""
        return self.lower.shape[0]

    @property
    def moment(self) -> Tensor:
        """Sum of x x', float32 [K, K], a new tensor."""
        below = self.lower.tril(-1)
        return below + below.T + self.lower.diagonal().diag()

    @property
    def importance(self) -> Tensor:
        """Mean square of each input, float32 [K]: the weights of the scale search (zeros without tokens)."""
        return self.lower.diagonal() / max(self.tokens, 1)

    def add(self, x: Tensor, x_full: Tensor | None = None) -> None:
        """Add tokens: x [tokens, K] and x_full [tokens, K], of any floating dtype.

        Either every call gives `x_full` or none does. Raises ValueError on another shape or when that changes. Zero
        tokens are fine. Values that are not finite surface in `factorize`.
        """
        if not self._check(x, x_full):
            return
        x = x.to(torch.float32)
        for start in range(0, self.columns, _STRIP):
            strip = slice(start, start + _STRIP)
            self.lower[start:, strip].addmm_(x[:, start:].T, x[:, strip])
        if x_full is not None:
            if self.cross is None:
                self.cross = torch.zeros_like(self.lower)
            self.cross.addmm_(x_full.to(torch.float32).T, x)
        self.tokens += x.shape[0]

    def _check(self, x: Tensor, x_full: Tensor | None) -> int:
        if x.ndim != 2 or x.shape[1] != self.columns:
            raise ValueError(f"inputs have shape [tokens, {self.columns}], got {tuple(x.shape)}")
        if x_full is not None and x_full.shape != x.shape:
            raise ValueError(f"inputs of both models have one shape, got {tuple(x.shape)} and {tuple(x_full.shape)}")
        if self.tokens and x.shape[0] and (self.cross is None) != (x_full is None):
            raise ValueError("x_full comes with all tokens or with none")
        return x.shape[0]


class Energy:
    """Sums of squares over tokens of K inputs, float32 [K]: all that a weighted scale search needs of a Hessian."""

    def __init__(self, columns: int, *, device: torch.device | str = "cpu") -> None:
        self.squares = torch.zeros(columns, dtype=torch.float32, device=device)
        self.tokens = 0

    @property
    def importance(self) -> Tensor:
        """See `Hessian.importance`."""
        return self.squares / max(self.tokens, 1)

    def add(self, x: Tensor) -> None:
        """Add tokens: x [tokens, K], of any floating dtype. Raises ValueError on another shape."""
        if x.ndim != 2 or x.shape[1] != self.squares.shape[0]:
            raise ValueError(f"inputs have shape [tokens, {self.squares.shape[0]}], got {tuple(x.shape)}")
        self.squares += x.to(torch.float32).square().sum(0)
        self.tokens += x.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A Hessian made ready for solving; one for all Linears of its fusion group.

    damped     float32 [K, K] moment with `damping` added to the diagonal
    damping    what was added
    order      int64 [K] columns by falling diagonal: the order in which they are rounded
    upper      float32 [K, K] upper U with U'U = inverse of damped[order][:, order]
    shift      float32 [K, K] or None: the target is W + W @ shift
    escalated  how often the damping had to grow tenfold before the factorization existed
    """

    damped: Tensor
    damping: float
    order: Tensor
    upper: Tensor
    shift: Tensor | None
    escalated: int

    def target(self, weight: Tensor) -> Tensor:
        """The float32 [N, K] that rounding should come near to, for a weight [N, K]."""
        target = weight.to(torch.float32)
        return target if self.shift is None else target + target @ self.shift

    def row_errors(self, difference: Tensor) -> Tensor:
        """Squared output error, without damping, of a weight difference: float32 [N, K] -> [N]."""
        damped = ((difference @ self.damped) * difference).sum(1)
        return damped - self.damping * (difference * difference).sum(1)


def factorize(hessian: Hessian, *, damping: float = DAMPING, correction: float = CORRECTION) -> Factors | None:
    """Factors of a Hessian, or None when there are none: no tokens, only zero inputs, or hopeless conditioning.

    Inputs that were always zero get only the damping: their weights are rounded to nearest. The damping grows tenfold
    up to eight times while Cholesky (float64) fails. Raises ValueError when a sum is not finite, or damping is not
    positive.
    """
    if damping <= 0:
        raise ValueError(f"damping must be positive, got {damping}")
    moment = hessian.moment
    for name, sums in (("inputs", moment), ("source inputs", hessian.cross)):
        if sums is not None and not bool(torch.isfinite(sums).all()):
            raise ValueError(f"the {name} of {hessian.tokens} calibration tokens hold or add up to non-finite values")
    diagonal = moment.diagonal()
    used = diagonal[diagonal > 0].double()
    if used.numel() == 0:
        return None
    usual = min(float(used.sum()) / hessian.columns, _OUTLIERS * float(used.median()))
    order = torch.argsort(diagonal, descending=True, stable=True)
    for escalated in range(_ESCALATIONS + 1):
        added = damping * 10.0**escalated * usual
        damped = moment.clone()
        damped.diagonal().add_(added)
        upper = _inverse_factor(damped[order][:, order])
        if upper is not None:
            cross = hessian.cross if correction else None
            shift = None if cross is None else correction * _over_damped(cross - moment, order, upper)
            return Factors(damped, added, order, upper, shift, escalated)
    return None


def _inverse_factor(matrix: Tensor) -> Tensor | None:
    """Upper float32 U with U'U = inverse(matrix), or None when the matrix is not positive definite.

    With rows and columns reversed, matrix = L L'; reversed back L is an upper R with matrix = R R', and U = 1 / R.
    """
    lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1).double())
    if bool(failed):
        return None
    identity = torch.eye(matrix.shape[0], dtype=torch.float64, device=matrix.device)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True).float()
    return upper.contiguous() if bool(torch.isfinite(upper).all()) else None


def _over_damped(sums: Tensor, order: Tensor, upper: Tensor) -> Tensor:
    """sums / damped, for sums [K, K]."""
    return (sums[:, order] @ upper.T @ upper)[:, torch.argsort(order)]
