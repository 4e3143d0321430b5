"""Which items become rows: filtered, without duplicates, in an order that only content and seed decide."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sparkquant.calibration.conversation import Conversation, Dropped, Item, Reason, Unusable
from sparkquant.calibration.mix import Filters, Mix
from sparkquant.calibration.rows import Row, RowMaker
from sparkquant.calibration.source_files import read_source

FIRST_PARTS = 4
"""Parts of one long item that are taken before every other item had its turn."""


@dataclass
class SourceCount:
    """What became of one source. Items are conversations or texts; `unused` ones came after enough rows."""

    read: int = 0
    filtered: int = 0
    used: int = 0
    unused: int = 0
    rows: int = 0
    tokens: int = 0
    dropped: Counter[Reason] = field(default_factory=Counter)


@dataclass
class Selection:
    """Rows with their sources, and the account of everything that became none."""

    rows: list[tuple[str, Row]] = field(default_factory=list)
    counts: dict[str, SourceCount] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    data_digest: str = ""

    def drop(self, source: str, dropped: Dropped) -> None:
        """Note what serves no row."""
        self.counts[source].dropped[dropped.reason] += 1
        self.dropped.append(dropped)


def select(mix: Mix, maker: RowMaker, *, rows: int, seed: int) -> Selection:
    """Read every source of the mix and fill `rows` rows by shares."""
    selection = Selection(counts={name: SourceCount() for name in mix.sources})
    items = _gather(mix, maker, selection)
    _drop_contained(items, selection)
    wells = {}
    for name, found in items.items():
        found.sort(key=lambda item: _rank(seed, name, item.digest))
        selection.counts[name].unused = len(found)
        wells[name] = _Well(name, found, maker, selection)
    _fill(mix, wells, selection, rows)
    selection.rows.sort(key=lambda row: _rank(seed, row[0], str(row[1].ids)))
    return selection


def _rank(seed: int, name: str, digest: str) -> str:
    return hashlib.sha256(f"{seed} {name} {digest}".encode()).hexdigest()


def _gather(mix: Mix, maker: RowMaker, selection: Selection) -> dict[str, list[Item]]:
    seen: set[str] = set()
    read: set[str] = set()
    kept: dict[str, list[Item]] = {}
    for name, source in mix.sources.items():
        kept[name] = []
        for item in read_source(mix, name):
            selection.counts[name].read += 1
            if isinstance(item, Dropped):
                selection.drop(name, item)
                continue
            try:
                read.add(f"{name} {item.digest}")
                wanted = _wanted(item, source.filters, maker)
            except Unusable as fault:
                selection.drop(name, Dropped(item.where, fault.reason, fault.what))
                continue
            if not wanted:
                selection.counts[name].filtered += 1
            elif item.digest in seen:
                selection.drop(name, Dropped(item.where, Reason.DUPLICATE, "the same as an item before"))
            else:
                seen.add(item.digest)
                kept[name].append(item)
    selection.data_digest = hashlib.sha256("\n".join(sorted(read)).encode()).hexdigest()
    return kept


def _wanted(item: Item, filters: Filters, maker: RowMaker) -> bool:
    if filters.tags and not item.tags.intersection(filters.tags):
        return False
    if item.tags.intersection(filters.without_tags):
        return False
    if filters.languages and item.language not in filters.languages:
        return False
    if filters.thinking is not None and filters.thinking != _thinking(item):
        return False
    if filters.tools is not None and filters.tools != bool(item.tools):
        return False
    if filters.min_tokens is None and filters.max_tokens is None:
        return True
    length = maker.whole(item).length
    return (filters.min_tokens or 0) <= length <= (filters.max_tokens or length)


def _thinking(item: Item) -> bool:
    return item.thinks or (isinstance(item, Conversation) and item.options.get("enable_thinking") is True)


def _drop_contained(items: dict[str, list[Item]], selection: Selection) -> None:
    """An agent's log holds each conversation once per step; only the longest of them stays."""
    ends: dict[int, bytes] = {}
    inside: set[bytes] = set()
    for found in items.values():
        for item in found:
            if isinstance(item, Conversation):
                *beginnings, ends[id(item)] = item.chain()
                inside.update(beginnings)
    for name, found in items.items():
        for item in found:
            if ends.get(id(item)) in inside:
                what = "the beginning of a longer conversation"
                selection.drop(name, Dropped(item.where, Reason.CONTAINED, what))
        items[name] = [item for item in found if ends.get(id(item)) not in inside]


class _Well:
    """The rows of one source, drawn one by one until it is dry."""

    def __init__(self, name: str, items: list[Item], maker: RowMaker, selection: Selection) -> None:
        self.name = name
        self.dry = False
        self._rows = self._all(items, maker, selection)

    def draw(self) -> Row | None:
        """The next row; None when there is no more."""
        row = next(self._rows, None)
        self.dry = row is None
        return row

    def _all(self, items: list[Item], maker: RowMaker, selection: Selection) -> Iterator[Row]:
        count = selection.counts[self.name]
        rest: list[tuple[Item, Iterator[Row]]] = []
        for item in items:
            count.unused -= 1
            parts = maker.rows(item)
            rows = self._usable(item, itertools.islice(parts, FIRST_PARTS), selection)
            used = False
            for row in rows:
                count.used += not used
                used = True
                yield row
            if used:
                rest.append((item, parts))
        for item, parts in rest:
            yield from self._usable(item, parts, selection)

    def _usable(self, item: Item, rows: Iterator[Row], selection: Selection) -> Iterator[Row]:
        try:
            for row in rows:
                if row.length:
                    yield row
                else:
                    selection.drop(self.name, Dropped(item.where, Reason.EMPTY, "no token"))
        except Unusable as fault:
            selection.drop(self.name, Dropped(item.where, fault.reason, fault.what))


def _fill(mix: Mix, wells: Mapping[str, _Well], selection: Selection, rows: int) -> None:
    """Draw by shares; what a dry source cannot give, the others do."""
    taken: set[tuple[int, ...]] = set()
    while (missing := rows - len(selection.rows)) > 0:
        flowing = {name: mix.sources[name].share for name, well in wells.items() if not well.dry}
        if not flowing:
            return
        for name, quota in _quotas(flowing, missing).items():
            for _ in range(quota):
                row = _fresh(wells[name], taken, selection)
                if row is None:
                    break
                selection.rows.append((name, row))
                selection.counts[name].rows += 1
                selection.counts[name].tokens += row.length


def _fresh(well: _Well, taken: set[tuple[int, ...]], selection: Selection) -> Row | None:
    """The next row that no other row equals: long prefixes cut to one length can become the same ids."""
    while (row := well.draw()) is not None:
        if row.ids not in taken:
            taken.add(row.ids)
            return row
        selection.drop(well.name, Dropped(well.name, Reason.DUPLICATE, "the same ids as another row"))
    return None


def _quotas(shares: Mapping[str, float], rows: int) -> dict[str, int]:
    """Whole numbers that add up to `rows`, as near to the shares as possible; ties go to the first named."""
    total = sum(shares.values())
    exact = {name: rows * share / total for name, share in shares.items()}
    quotas = {name: int(value) for name, value in exact.items()}
    by_rest = sorted(exact, key=lambda name: quotas[name] - exact[name])
    for name in by_rest[: rows - sum(quotas.values())]:
        quotas[name] += 1
    return quotas
