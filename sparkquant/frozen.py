"""A dict that is read-only."""

from __future__ import annotations

from typing import Any, NoReturn, Self


class Frozen(dict[Any, Any]):
    """A dict that stays as it was validated: what a recipe protects cannot be assigned away later."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a recipe cannot be changed: load another one, or use `with_method`")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # its values are frozen, too
