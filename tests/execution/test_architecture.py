"""The arrows of the design: who may know whom, who pays for torch, and who may print."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from sparkquant.recipe_files import recipe_names
from tests.execution.runs import Checkpoints, in_a_child, source_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sparkquant"

MAY_SEE = {
    "errors": "",
    "events": "",
    "report": "",
    "schemes": "errors",
    "layers": "errors",
    "positions": "errors",
    "journal": "errors lock_holder",
    "layouts": "errors layers sizes",
    "sizes": "errors layers",
    "engine": "errors schemes layers",
    "numerics": "errors schemes",
    "checkpoint": "errors schemes",
    "shard_files": "errors checkpoint",
    "reading": "errors schemes checkpoint shard_files",
    "methods": "",
    "quantizers": "errors schemes layers layouts methods decisions",
    "accept": "",
    "recipe": "accept errors frozen schemes layers layouts positions methods",
    "recipe_files": "errors schemes layers layouts positions recipe",
    "shard_writer": "errors schemes",
    "writer": "errors schemes checkpoint footprint journal shard_writer",
    "hfconfig": "errors schemes layers layouts recipe decisions engine",
}
"""Parts whose whole view is fixed; imports inside functions count too."""

NEVER_SEES = {
    "decisions": "verification hfconfig execute writer backends numerics cli",
    "footprint": "verification hfconfig execute writer backends numerics cli",
    "planning": "verification hfconfig execute writer backends numerics cli",
    "verification": "execute writer backends planning hfconfig cli",
    "formats": "execute writer backends planning hfconfig verification cli",
    "backends": (
        "execute filling whole_units writer shard_writer journal checkpoint shard_files reading source live planning"
        " hfconfig verification cli"
    ),
}
"""What a part must not know, however it grows."""

ONLY_SEEN_BY = {"cli": {"cli", "__main__"}, "execute": {"cli", "__init__"}}

TORCH_FREE = (
    "planning", "decisions", "footprint", "comparison", "recipe", "recipe_files", "layouts", "engine", "checkpoint",
    "source", "hfconfig", "report", "formats", "verification.gate", "reporting.document", "reporting.page", "cli",
    "evidence", "card", "publishing", "hub", "repository_recipe", "repository_lint",
)  # fmt: skip
HEAVY = {"torch", "numba", "numpy", "transformers", "safetensors", "compressed_tensors", "huggingface_hub", "xxhash"}
QUANTIZERS = {"llmcompressor", "auto_round", "modelopt", "gptqmodel", "awq", "torchao"}


@dataclass(frozen=True)
class Import:
    """One imported module; `late` when it stands inside a function."""

    target: str
    late: bool


@cache
def _modules() -> dict[str, Path]:
    """Dotted names below the package; a package goes by its own name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and parts[:-1] else parts)] = path
    return found


@cache
def _imports(module: str) -> frozenset[Import]:
    tree = ast.parse(_modules()[module].read_text(encoding="utf-8"))
    return frozenset(_walk(tree, late=False))


def _walk(node: ast.AST, *, late: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import"
            module = child.module or ""
            inner = [f"{module}.{alias.name}" for alias in child.names]
            submodules = [name for name in inner if name.removeprefix("sparkquant.") in _modules()]
            yield from (Import(name, late) for name in submodules or [module])
        else:
            yield from _walk(child, late=late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _part(module: str) -> str:
    return module.split(".")[0]


def _seen_by(part: str) -> set[tuple[str, str]]:
    """(module of the part, part that it imports), the part itself aside."""
    return {
        (module, _part(found.target.removeprefix("sparkquant.")))
        for module in _modules()
        if _part(module) == part
        for found in _imports(module)
        if found.target.startswith("sparkquant.") and _part(found.target.removeprefix("sparkquant.")) != part
    }


@pytest.mark.parametrize("part", MAY_SEE)
def test_a_part_sees_what_it_may(part: str) -> None:
    assert {(module, seen) for module, seen in _seen_by(part) if seen not in MAY_SEE[part].split()} == set()


@pytest.mark.parametrize("part", NEVER_SEES)
def test_a_part_never_sees_what_lies_above_it(part: str) -> None:
    assert {(module, seen) for module, seen in _seen_by(part) if seen in NEVER_SEES[part].split()} == set()


@pytest.mark.parametrize("part", ONLY_SEEN_BY)
def test_the_top_is_seen_by_few(part: str) -> None:
    watchers = {_part(m) for m in _modules() for other, seen in _seen_by(_part(m)) if other == m and seen == part}
    assert watchers <= ONLY_SEEN_BY[part]


def test_every_part_of_the_rules_exists() -> None:
    parts = {_part(module) for module in _modules()}
    assert {*MAY_SEE, *NEVER_SEES, "cli", "execute"} <= parts
    assert {name for names in (*MAY_SEE.values(), *NEVER_SEES.values()) for name in names.split()} <= parts


def test_imports_do_not_run_in_circles() -> None:
    graph = {
        module: {
            found.target.removeprefix("sparkquant.")
            for found in _imports(module)
            if not found.late and found.target.removeprefix("sparkquant.") in _modules()
        }
        for module in _modules()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for seen in sorted(graph[module] - {module}):
                visit(seen, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_other_quantizers_are_imported_by_backends_alone_and_the_engine_never() -> None:
    for module in _modules():
        for found in _imports(module):
            top = found.target.split(".")[0]
            assert top not in {"vllm", "sglang"}, module
            assert top not in QUANTIZERS or _part(module) == "backends", module


# Torch-free


@pytest.mark.parametrize("entry", TORCH_FREE)
def test_importing_what_plans_and_reads_costs_nothing_heavy(entry: str) -> None:
    """Follows the imports that run at once, and says by which way torch came in."""
    todo = [(entry, (entry,))]
    seen = set()
    while todo:
        module, way = todo.pop()
        seen.add(module)
        for found in _imports(module):
            name = found.target.removeprefix("sparkquant.")
            if found.late:
                continue
            assert found.target.split(".")[0] not in HEAVY, " -> ".join([*way, found.target])
            if name in _modules() and name not in seen:
                todo.append((name, (*way, name)))


def test_planning_and_reading_run_without_torch(checkpoints: Checkpoints, tmp_path: Path) -> None:
    import sparkquant

    source = source_of("vision", checkpoints)
    sparkquant.quantize(source, "qwen-hybrid-w4a16", tmp_path / "out", method="rtn")
    code = (
        "import contextlib, io, sys, sparkquant\n"
        "from sparkquant.cli import main\n"
        "from sparkquant.recipe_files import load_recipe, recipe_names\n"
        "source, out = sys.argv[1:]\n"
        "for name in [name for name in recipe_names() if 'qwen3_5' in load_recipe(name).families]:\n"
        "    plan = sparkquant.plan(source, name)\n"
        "    plan.to_json(), plan.digest, plan.explain('lm_head')\n"
        "assert sparkquant.diff(source, out).changes\n"
        "assert sparkquant.diff(*recipe_names()[:2]).changes\n"
        "assert sparkquant.verify(out, source=source, level='headers').ok\n"
        "for arguments in (['--help'], ['plan', source], ['recipes', 'ls'], ['verify', out, '--headers']):\n"
        "    sys.argv = ['sparkquant', *arguments]\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "    loaded = {'torch', 'numba', 'numpy', 'transformers', 'compressed_tensors'} & set(sys.modules)\n"
        "    assert not loaded, (arguments, loaded)\n"
    )
    done = in_a_child(code, source, tmp_path / "out")
    assert done.stdout == ""
    assert recipe_names()


# Manners


def test_only_the_command_line_prints() -> None:
    printing = []
    for module, path in _modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if _part(module) == "cli" or not isinstance(node, ast.Call):
                continue
            if ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write", "warnings.warn"):
                printing.append(f"{module}:{node.lineno}")
    assert printing == []


def test_no_file_names_a_place_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    place = re.compile(r"(?<![\w.])/(?:work|root|home|Users|mnt|data|scratch)/[A-Za-z0-9._-]+")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        # Conversations may talk about any path.
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".txt", "") and path.is_file():
            text = path.read_text(encoding="utf-8")
            found += [f"{name}: {match.group()}" for match in place.finditer(text)]
    assert found == []


def test_modules_are_short_enough_to_read() -> None:
    long = {name: count for name, path in _modules().items() if (count := len(path.read_text().splitlines())) > 400}
    assert long == {}
