"""`python -m benchmarks.guide`: write the tables of recipes/README.md from the records in recipes/records/.

    plans.json     what each recipe makes of published shapes, by arithmetic; `--plans` plans them again
    RECIPE.json    what `benchmarks.records` measured

A generated part stands between `<!-- NAME -->` and `<!-- /NAME -->`; tests compare it with the records.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sparkquant.planning import plan
from sparkquant.recipe import Recipe
from sparkquant.recipe_files import load_recipe, recipe_folder, recipe_names
from sparkquant.rowwise import paired_rows

FOLDER = recipe_folder() / "records"
GUIDE = recipe_folder() / "README.md"

BIG, MIXTURE, DEMO = "Qwen3.5-27B", "Qwen3.5-35B-A3B", "hybrid-5m"
FIRST = "qwen-hybrid-w4a16"
"""The recipe that the others are compared with."""

EXAMPLES: Mapping[str, str] = {
    "kimi-linear-w4a16": "Kimi-Linear-48B-A3B",
    "nemotron-h-nvfp4-fp8": "Nemotron-3-Nano-30B-A3B",
    "nemotron-h-w4a16-fp8": "Nemotron-3-Nano-30B-A3B",
    "granite-4-h-w4a16-fp8": "Granite-4.0-H-Small",
    "mamba2-hybrid-w4a16-fp8": "Falcon-H1-34B",
    "mamba2-hybrid-fp8": "Falcon-H1-34B",
    "lfm2-w4a16": "LFM2-8B-A1B",
    "lfm2-w4a16-conv": "LFM2-8B-A1B",
    "moe-w4a16-fp8": "GLM-4.5-Air",
    "moe-w4a16-experts": "Kimi-Linear-48B-A3B",
}
"""A published model for each recipe of another family, where one is known by its shapes."""

SMALL_DROP = 0.02
"""Share of first drafts that may be lost and still count as none: less than the noise of 1,536 drafts."""

Record = Mapping[str, Any]


@cache
def shipped(name: str) -> Recipe:
    """A shipped recipe, read once."""
    return load_recipe(name)


def hybrids() -> list[str]:
    """Recipes for the family of the 27B."""
    return [name for name in recipe_names() if "qwen3_5" in shipped(name).families]


def others() -> list[str]:
    """Recipes for other families: those with an example first."""
    rest = [name for name in recipe_names() if name not in hybrids()]
    return [*EXAMPLES, *(name for name in rest if name not in EXAMPLES)]


def plans() -> list[dict[str, Any]]:
    """Plan every recipe for its models, from headers without data."""
    from tests.data.published import QWEN3_5_27B, QWEN3_5_35B_A3B, qwen3_5_27b_shapes, write_headers
    from tests.data.shapes import tensor_shapes
    from tests.families.published import PUBLISHED
    from tests.families.shapes import shapes_of

    shapes = {BIG: (QWEN3_5_27B, qwen3_5_27b_shapes()), MIXTURE: (QWEN3_5_35B_A3B, tensor_shapes(QWEN3_5_35B_A3B))}
    shapes |= {name: (PUBLISHED[name].config, shapes_of(PUBLISHED[name].config)) for name in set(EXAMPLES.values())}
    wanted = [(name, model) for name in hybrids() for model in (BIG, MIXTURE, DEMO)] + list(EXAMPLES.items())
    with tempfile.TemporaryDirectory() as folder:
        where = {model: write_headers(Path(folder) / model, *found) for model, found in shapes.items()}
        where[DEMO] = recipe_folder().parent / "examples" / DEMO
        return [_planned(name, model, where[model]) for name, model in wanted]


def _planned(name: str, model: str, folder: Path) -> dict[str, Any]:
    made = plan(folder, name)
    return {
        "recipe": name,
        "model": model,
        "tensors": made.totals["tensors"],
        "bytes": made.totals["output_bytes"],
        "bits_per_weight": made.totals["bits_per_weight"],
        "modules": made.totals["modules"],
        "decode_bytes": made.footprint.decode_bytes,
        "bandwidth_gbps": made.footprint.bandwidth_gbps,
        "tokens_per_second_at_most": made.footprint.decode_ceiling_tps,
    }


def read_plans() -> dict[tuple[str, str], Record]:
    """Planned rows by (recipe, model)."""
    rows = json.loads((FOLDER / "plans.json").read_text(encoding="utf-8"))
    return {(row["recipe"], row["model"]): row for row in rows}


def read_records() -> dict[str, Record]:
    """Measured records by recipe."""
    paths = sorted(path for path in FOLDER.glob("*.json") if path.name != "plans.json")
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def parts() -> dict[str, str]:
    """The generated parts of the guide by name."""
    planned, measured = read_plans(), read_records()
    return {
        "choose": "\n".join(_choose(planned, measured)),
        "sizes": "\n".join(_sizes(planned)),
        "measured": "\n".join(_measured(measured)),
        "others": "\n".join(_others(planned)),
    }


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield _row(header)
    yield "|" + "---|" * len(header)
    yield from map(_row, rows)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"


def _kl(record: Record) -> str:
    found = record["result"]
    return f"{found['kl_mean']:.4f} ± {found['kl_se']:.4f}"


def _first_draft(record: Record) -> tuple[float, float]:
    """Acceptance of the first draft, source and result, in the worse set of rows."""
    rates = record["result"]["acceptance"].values()
    worst = min(rates, key=lambda sides: sides["result"][0] - sides["source"][0])
    return worst["source"][0], worst["result"][0]


def _choose(planned: Mapping[tuple[str, str], Record], measured: Mapping[str, Record]) -> Iterator[str]:
    big = {name: planned[name, BIG] for name in hybrids()}
    small = min(big, key=lambda name: big[name]["bytes"])
    fast = min(big, key=lambda name: big[name]["decode_bytes"])
    # Recipes that differ in the draft head alone have the same KL: the smaller one then.
    good = min(measured, key=lambda name: (measured[name]["result"]["kl_mean"], measured[name]["bytes"]))
    four = [name for name in measured if big[name]["bits_per_weight"] < 8]
    best4 = min(four, key=lambda name: measured[name]["result"]["kl_mean"])
    kept = [name for name in four if _first_draft(measured[name])[0] - _first_draft(measured[name])[1] < SMALL_DROP]
    drafts = min(kept or four, key=lambda name: measured[name]["result"]["kl_mean"])
    source, result = _first_draft(measured[drafts])
    speed = (
        f"{_gib(big[fast]['decode_bytes'])} GiB are read for a token of the 27B, which allows"
        f" {big[fast]['tokens_per_second_at_most']:.1f} tokens per second on a GB10"
    )
    yield from _table(
        ("you want", "take", "why"),
        [
            ("the smallest", f"`{small}`", f"{_gib(big[small]['bytes'])} GiB for the 27B"),
            ("the fastest", f"`{fast}`", speed),
            ("the best quality", f"`{good}`", f"KL {_kl(measured[good])}"),
            ("the best quality below 8 bits", f"`{best4}`", f"KL {_kl(measured[best4])}"),
            (
                "drafting with MTP, below 8 bits",
                f"`{drafts}`",
                f"first draft accepted {result:.1%}, by the source {source:.1%}",
            ),
        ],
    )


def _sizes(planned: Mapping[tuple[str, str], Record]) -> Iterator[str]:
    rows = []
    for name in sorted(hybrids(), key=_order):
        big, mixture, demo = (planned[name, model] for model in (BIG, MIXTURE, DEMO))
        rows.append(
            (
                f"`{name}`", _gib(big["bytes"]), f"{big['bytes']:,}", f"{big['bits_per_weight']:.2f}",
                f"{big['tokens_per_second_at_most']:.1f}", _gib(mixture["bytes"]), f"{demo['bytes'] / 2**20:.2f}",
            )
        )  # fmt: skip
    header = ("recipe", "27B GiB", "27B bytes", "bits", "tok/s", "35B-A3B GiB", "demo MiB")
    yield from _table(header, rows)


def _order(name: str) -> tuple[bool, str]:
    return name != FIRST, name


def _measured(measured: Mapping[str, Record]) -> Iterator[str]:
    base = measured[FIRST]["result"]
    rows = []
    for name in sorted(measured, key=lambda name: measured[name]["result"]["kl_mean"]):
        record, found = measured[name], measured[name]["result"]
        versus = paired_rows(base["kl_rows"], found["kl_rows"])
        source, result = _first_draft(record)
        rows.append(
            (
                f"[{name}](records/{name}.json)", record["recipe"]["method"]["name"], _kl(record),
                "–" if name == FIRST else f"{versus.mean:+.4f} ± {versus.se:.4f}", f"{found['top1']:.2%}",
                f"{found['nll']['result']:.4f}", f"{found['recall']['result']} of {found['recall']['tasks']}",
                f"{result:.1%}",
            )
        )  # fmt: skip
    recall = f"{base['recall']['source']} of {base['recall']['tasks']}"
    source, _ = _first_draft(measured[FIRST])
    rows.append(("BF16", "", "0", "", "100%", f"{base['nll']['source']:.4f}", recall, f"{source:.1%}"))
    header = (
        "recipe and record", "method", "KL", f"KL less that of `{FIRST}`", "same token", "NLL", "recall", "first draft",
    )  # fmt: skip
    yield from _table(header, rows)
    yield ""
    yield _conditions(measured)
    for told in _reservations(measured):
        yield from ("", told)


def _conditions(measured: Mapping[str, Record]) -> str:
    first = measured[FIRST]
    model, told, found = first["model"], first["conditions"], first["result"]
    seen = "".join(_rows_seen(measured))
    return (
        f"Measured on a trained hybrid of {model['parameters'] / 1e6:.1f} million weights ({model['name']}),"
        f" {told['data']}: {found['tokens']:,} tokens, {sum(found['drafts'].values()):,} drafts;"
        f" {told['activations']}.{seen}"
    )


def _rows_seen(measured: Mapping[str, Record]) -> Iterator[str]:
    """What calibrated methods saw, and what they see when the recipes are used as they are."""
    seen: dict[tuple[int, int, str], list[str]] = {}
    for name, record in measured.items():
        if rows := record["conditions"]["calibration"]:
            seen.setdefault((rows["rows"], rows["tokens"], rows["name"]), []).append(name)
    for (count, tokens, mix), names in seen.items():
        who = "Calibrated methods" if len(seen) == 1 else ", ".join(f"`{name}`" for name in names)
        other = sorted({shipped(name).calibration.mix for name in names} - {mix})
        instead = (
            f" of the text that this model was trained on, not of the {', '.join(other)} mix that the recipes name"
        )
        yield f" {who} saw {count} rows, {tokens:,} tokens{instead if other else ''}."


def other_methods(measured: Mapping[str, Record]) -> list[str]:
    """Recipes that were measured with another method than they ship with."""
    return [name for name in measured if measured[name]["recipe"]["method"] != shipped(name).as_json()["method"]]


def unmeasured(measured: Mapping[str, Record]) -> list[str]:
    """Recipes of the hybrids without a record."""
    return [name for name in hybrids() if name not in measured]


def _reservations(measured: Mapping[str, Record]) -> Iterator[str]:
    """What the table does not say of the recipes as they are shipped."""
    if other := other_methods(measured):
        told = ", ".join(f"`{name}` ({shipped(name).method.name})" for name in other)
        yield f"These ship with another method than they were measured with here: {told}."
    if missing := unmeasured(measured):
        yield f"Without a record, not measured: {', '.join(f'`{name}`' for name in missing)}."


def _others(planned: Mapping[tuple[str, str], Record]) -> Iterator[str]:
    rows = []
    for name in others():
        cells = [f"`{name}`", ", ".join(shipped(name).families), EXAMPLES.get(name, "")]
        row = planned.get((name, EXAMPLES.get(name, "")))
        numbers = ("", "", "")
        if row is not None:
            numbers = (_gib(row["bytes"]), f"{row['bits_per_weight']:.2f}", f"{row['tokens_per_second_at_most']:.1f}")
        rows.append((*cells, *numbers))
    yield from _table(("recipe", "families", "for instance", "GiB", "bits", "tok/s"), rows)
    yield ""
    yield (
        "None of these has a record: there was no trained model of their families to measure them on. The numbers are"
        " arithmetic; empty cells have no published model whose shapes are known here."
    )


def filled(text: str) -> str:
    """The guide with its generated parts as the records have them."""
    for name, part in parts().items():
        pattern = re.compile(rf"<!-- {name} -->\n.*?<!-- /{name} -->", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"recipes/README.md needs one part <!-- {name} --> ... <!-- /{name} -->")
        text = pattern.sub(lambda _, name=name, part=part: f"<!-- {name} -->\n{part}\n<!-- /{name} -->", text)  # type: ignore[misc]
    return text


def main() -> None:
    """Write plans.json, if asked to, and the guide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", action="store_true", help="plan every recipe again")
    if parser.parse_args().plans:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / "plans.json").write_text(json.dumps(plans(), indent=1) + "\n", encoding="utf-8")
    GUIDE.write_text(filled(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
