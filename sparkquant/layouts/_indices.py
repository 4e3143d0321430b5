"""Layer numbers as regexes: a hybrid's rules depend on the layer, and a draft head may be a layer behind the last."""

from __future__ import annotations

from collections.abc import Iterable


def among(indices: Iterable[int]) -> str:
    """One of these numbers; of none, a regex that never matches."""
    numbers = sorted(set(indices))
    return f"(?:{'|'.join(map(str, numbers))})" if numbers else r"(?!)"


def below(count: int) -> str:
    """A number from 0 to count - 1; one lookahead is quicker than as many alternatives."""
    return rf"(?!{at_least(count)}\.)\d+"


def at_least(first: int) -> str:
    """A number from `first` on: 61 gives `(?:6[1-9]|[7-9]\\d|[1-9]\\d{2,})`."""
    digits = str(max(0, first))
    width = len(digits)
    options = [digits[:-1] + _from(int(digits[-1]))]
    for place in range(width - 2, -1, -1):
        if digits[place] != "9":
            options.append(digits[:place] + _from(int(digits[place]) + 1) + r"\d" * (width - 1 - place))
    options.append(rf"[1-9]\d{{{width},}}")
    return f"(?:{'|'.join(options)})"


def _from(digit: int) -> str:
    return "9" if digit == 9 else f"[{digit}-9]"
