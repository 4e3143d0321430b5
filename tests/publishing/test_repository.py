"""A recipe in a model repository: found, linted, kept inside, and applied; the examples run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import sparkquant
from sparkquant.cli.linting import annotation
from sparkquant.errors import Problem, RecipeError, SparkquantError
from sparkquant.recipe_files import recipe_folder, recipe_names
from sparkquant.recipe_schema import recipe_schema, recipe_schema_text
from sparkquant.repository_lint import described, lint_repository
from sparkquant.repository_recipe import calibration_of, kept_at_home, recipe_path, repository_recipe
from tests.cli.running import DEMO, ROOT, environment, invoke
from tests.publishing.hub_server import WRITER
from tests.publishing.running_hub import RunningHub

# The client sends large files in a way that its transport has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")

IN_REPOSITORY = ROOT / "examples" / "recipe-in-model-repo"
PIPELINE = ROOT / "examples" / "publish-pipeline"
MINE = "extends: qwen-hybrid-fp8\nname: mine\nsummary: as the owner of this model wants it\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The demo checkpoint as its owner's repository."""
    folder = tmp_path / "repository"
    shutil.copytree(DEMO, folder)
    return folder


def with_recipe(folder: Path, text: str = MINE, name: str = "sparkquant.yaml") -> Path:
    """The repository with a recipe."""
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def without_weights(folder: Path) -> Path:
    """As git checks it out without large files."""
    for path in folder.glob("*.safetensors"):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    return folder


# Found and applied


@pytest.mark.parametrize("name", ["sparkquant.yaml", "recipe.yaml"])
def test_the_repositorys_recipe_is_applied_when_none_is_named(repository: Path, name: str, tmp_path: Path) -> None:
    with_recipe(repository, name=name)
    assert sparkquant.plan(repository).recipe.name == "mine"
    result = invoke("quantize", repository, "--method", "rtn", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert f"recipe 'mine': {name} of the repository" in result.stderr
    assert json.loads((tmp_path / "out/sparkquant/plan.json").read_text())["recipe"]["name"] == "mine"
    assert sparkquant.plan(repository, "qwen-hybrid-w4a16").recipe.name == "qwen-hybrid-w4a16"


def test_the_first_name_counts_and_other_tools_files_do_not(repository: Path) -> None:
    with_recipe(repository, "default_stage:\n  default_modifiers:\n    GPTQModifier: {scheme: W4A16}\n", "recipe.yaml")
    assert recipe_path(repository) is None
    assert sparkquant.plan(repository).recipe.name == "qwen-hybrid-w4a16"
    with_recipe(repository, MINE.replace("mine", "second"), "recipe.yaml")
    with_recipe(repository)
    assert sparkquant.plan(repository).recipe.name == "mine"


def test_a_repository_on_the_hub_brings_its_recipe(
    repository: Path, hub: RunningHub, client: None, tmp_path: Path
) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    shutil.copyfile(IN_REPOSITORY / "sparkquant.yaml", repository / "sparkquant.yaml")
    disable_progress_bars()
    HfApi().create_repo("me/model")
    HfApi().upload_folder(repo_id="me/model", folder_path=repository)
    done = hub.run("quantize", "me/model", "--method", "rtn", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "recipe 'house-fp8': sparkquant.yaml of the repository" in done.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == ["me/model"]
    assert "huggingface.co/me/model) at revision `" in card


# Untrusted


@pytest.mark.parametrize(
    ("mix", "fault"),
    [
        ("/etc/passwd", "leads out of the repository"),
        ("../data/mix.yaml", "leads out of the repository"),
        ("data/../../mix.yaml", "leads out of the repository"),
        ("~/mix.yaml", "leads out of the repository"),
        ("https://example.org/mix.yaml", "leads out of the repository"),
        ("..\\\\mix.yaml", "leads out of the repository"),
        (".git/config.json", "names a hidden file"),
        ("absent.jsonl", "is no file of the repository"),
        ("link.jsonl", "is no regular file of the repository"),
        ("linked/rows.json", "is no regular file of the repository"),
        ("data", None),
    ],
)
def test_calibration_stays_inside(repository: Path, tmp_path: Path, mix: str, fault: str | None) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "rows.json").write_text("[[1, 2]]")
    (repository / "link.jsonl").symlink_to(tmp_path / "outside" / "rows.json")
    (repository / "linked").symlink_to(tmp_path / "outside")
    with_recipe(repository, f'{MINE}method: gptq\ncalibration: {{mix: "{mix}"}}\n')
    if fault is None:  # a bare word is the name of a shipped mix, and there is none
        assert calibration_of(repository_recipe(repository / "sparkquant.yaml"), repository) == mix
        return
    with pytest.raises(RecipeError, match="reaches out of its repository") as caught:
        sparkquant.plan(repository)
    (problem,) = caught.value.problems
    assert fault in problem.what
    assert re.search(r"sparkquant\.yaml:5:\d+$", problem.where)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{conversations: /etc/*.jsonl}", "leads out"),
        ("{conversations: ../outside/*.jsonl}", "leads out"),
        ("{text: '~/*.txt'}", "leads out"),
        ("{conversations: linked}", "linked folder"),
        ("{conversations: '*.jsonl'}", "by a link"),
        ("{hub: them/data, columns: {text: text}}", "from the hub"),
    ],
)
def test_a_mix_of_the_repository_stays_inside(repository: Path, tmp_path: Path, source: str, fault: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.jsonl").write_text("{}\n")
    (repository / "linked").symlink_to(tmp_path / "outside")
    (repository / "x.jsonl").symlink_to(tmp_path / "outside" / "x.jsonl")
    (repository / "mix.yaml").write_text(f"name: m\nsummary: rows of the owner\nsources:\n  s: {source}\n")
    with_recipe(repository, f"{MINE}method: gptq\ncalibration: {{mix: mix.yaml}}\n")
    with pytest.raises(SparkquantError) as caught:
        sparkquant.plan(repository)
    assert any(fault in problem.what for problem in caught.value.problems), caught.value
    assert all(problem.where.startswith("mix.yaml:4:") for problem in caught.value.problems)


def test_rows_of_the_repository_are_found_wherever_one_stands(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "rows.json").write_text(json.dumps([[n % 2000 for n in range(r, r + 64)] for r in range(8)]))
    with_recipe(repository, f"{MINE}calibration: {{mix: rows.json}}\n")
    monkeypatch.chdir(tmp_path)
    plan = sparkquant.plan(repository)
    assert calibration_of(plan.recipe, repository) == str(repository / "rows.json")
    assert str(tmp_path) not in plan.to_json()


OWN_MIX = """
name: own
summary: what our users asked
sources:
  logs: {conversations: "data/*.jsonl", exclude: [data/public.jsonl]}
  code: {text: ["*.py", chat_template.jinja]}
  absent: {text: ["nothing/*.txt"]}
"""


@pytest.mark.parametrize("named", [True, False], ids=["by the recipe", "by the caller"])
def test_neither_recipe_nor_calibration_text_goes_into_a_result(repository: Path, tmp_path: Path, named: bool) -> None:
    """Results are published; what a model needs to run is carried even where it is calibrated on."""
    (repository / "data").mkdir()
    for name in ("data/logs.jsonl", "data/public.jsonl", "modeling.py", "notes.txt"):
        (repository / name).write_text("{}\n")
    (repository / "own.yaml").write_text(OWN_MIX)
    with_recipe(repository, f"{MINE}calibration: {{mix: own.yaml}}\n" if named else MINE)
    stays = {path.name for path in kept_at_home(repository, None if named else repository / "own.yaml")}
    assert stays == {"sparkquant.yaml", "own.yaml", "logs.jsonl", "modeling.py", "chat_template.jinja"}
    if named:
        made = sparkquant.quantize(repository, out=tmp_path / "out", method="rtn")
        names = {path.relative_to(made.out).as_posix() for path in made.out.rglob("*")}
        assert {"data/public.jsonl", "modeling.py", "notes.txt", "chat_template.jinja"} <= names
        assert not names & {"sparkquant.yaml", "own.yaml", "data/logs.jsonl"}
        assert made.plan.recipe.name == "mine"


@pytest.mark.parametrize(
    "text",
    [
        "extends: ../other.yaml\nname: m\nsummary: a recipe\n",
        "extends: /etc/passwd\nname: m\nsummary: a recipe\n",
        "a: &a [1]\nb: *a\n",
        "!!python/object/apply:os.system [true]\n",
        "name: !env HOME\n",
        "x: " + "a" * 200_000 + "\n",
    ],
)
def test_a_recipe_is_plain_data_that_extends_shipped_ones(repository: Path, text: str) -> None:
    with_recipe(repository, text)
    with pytest.raises(RecipeError):
        sparkquant.plan(repository)
    result = invoke("recipes", "lint", repository)
    assert result.exit_code == 2
    assert "Traceback" not in result.stdout + result.stderr


def test_a_linked_recipe_is_refused(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    (repository / "sparkquant.yaml").symlink_to(tmp_path / "mine.yaml")
    with pytest.raises(SparkquantError, match="no regular file of this folder"):
        sparkquant.plan(repository)


# Linted


def test_lint_needs_no_weights(repository: Path) -> None:
    with_recipe(without_weights(repository))
    result = invoke("recipes", "lint", repository)
    assert result.exit_code == 0
    assert "the weights are not here" in result.stdout
    for path in repository.glob("*.safetensors"):
        path.unlink()
    assert invoke("recipes", "lint", repository).stdout == result.stdout


def test_shapes_by_config_are_those_of_the_headers(repository: Path) -> None:
    whole, notes = described(repository)
    assert notes == []
    by_config, notes = described(without_weights(repository))
    assert notes == ["the weights are not here: names are those of the index, shapes those of config.json"]
    assert set(by_config.tensors) == set(whole.tensors)
    plan = sparkquant.plan(DEMO, "qwen-hybrid-w4a16")
    for name, decision in plan.decisions.items():
        placement = plan.layout.place(name)
        assert placement is not None
        if decision.scheme is not None and "|" not in placement.rule.shape:  # config.json leaves no choice
            assert by_config.tensors[name].shape == whole.tensors[name].shape, name


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("text", "place", "told"),
    [
        (f"{MINE}shemes: {{}}\n", "4:1", "did you mean 'schemes'"),
        (f"{MINE}schemes:\n  mlp.down: w5a16\n", "5:13", "w5a16"),
        (MINE.replace("qwen-hybrid-fp8", "lfm2-w4a16"), "1:1", "is for lfm2, lfm2_moe; this checkpoint is qwen3_5"),
        (
            f"{MINE}overrides:\n- {{layers: [9], class: mlp.down, scheme: fp8, why: measured so}}\n",
            "4:1",
            "hits nothing",
        ),
        (f"{MINE}schemes:\n  attention.qkv: {{scheme: w4a16, group_size: 96}}\n", "5:", "group_size 96"),
    ],
)
def test_faults_have_their_line(repository: Path, text: str, place: str, told: str, weights: bool) -> None:
    with_recipe(repository if weights else without_weights(repository), text)
    result = invoke("recipes", "lint", repository)
    assert result.exit_code == 2
    (line,) = [line for line in result.stdout.splitlines() if ": note: " not in line]
    assert line.startswith(f"{repository}/sparkquant.yaml:{place}"), line
    assert told in line
    marked = invoke("recipes", "lint", repository, "--format", "github").stdout.splitlines()[0]
    row, _, column = place.partition(":")
    assert marked.startswith(f"::error file={repository}/sparkquant.yaml,line={row},col={column}"), marked


def test_a_shape_that_a_scheme_cannot_take_is_told_at_its_line(repository: Path) -> None:
    config = json.loads((repository / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 480
    (repository / "config.json").write_text(json.dumps(config))
    with_recipe(without_weights(repository), MINE.replace("qwen-hybrid-fp8", "qwen-hybrid-w4a16") + "schemes:\n"
                "  mlp.down: w4a16\n")  # fmt: skip
    found = lint_repository(repository)
    assert [problem.where for problem in found.problems] == ["sparkquant.yaml:5:3"]
    assert "and 3 more: " in found.problems[0].what


@pytest.mark.parametrize("what", ["no recipe", "no index", "broken config", "unknown family", "unknown tensor"])
def test_a_repository_that_cannot_be_planned_says_why(repository: Path, what: str) -> None:
    with_recipe(without_weights(repository))
    config, index = repository / "config.json", repository / "model.safetensors.index.json"
    if what == "no recipe":
        (repository / "sparkquant.yaml").unlink()
    elif what == "no index":
        index.unlink()
    elif what == "broken config":
        config.write_text("{")
    elif what == "unknown family":
        config.write_text(config.read_text().replace('"qwen3_5"', '"qwen9"'))
    else:
        index.write_text(index.read_text().replace("mlp.down_proj", "mlp.dwn_proj"))
    result = invoke("recipes", "lint", repository, "--format", "github")
    assert result.exit_code == 2
    assert result.stdout.startswith("::error")
    assert "Traceback" not in result.stdout


def test_annotations_cannot_be_forged() -> None:
    told = annotation(Problem("a,b:c.yaml:3:4", "100 %\n::warning::x", "hint"))
    assert told == "::error file=a%2Cb%3Ac.yaml,line=3,col=4::100 %25%0A::warning::x; hint"
    assert annotation(Problem("", "x\ry")) == "::error::x%0Dy"


def test_plain_recipe_files_are_linted_as_before(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    result = invoke("recipes", "lint", tmp_path / "mine.yaml")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'mine.yaml'}: ok\n")
    assert invoke("recipes", "lint", tmp_path / "mine.yaml", "--format", "xml").exit_code == 2


# Schema


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_names_its_schema_and_keeps_it(name: str) -> None:
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert (recipe_folder() / "recipe.schema.json").read_text() == recipe_schema_text()
    jsonschema.validate(yaml.safe_load(text), recipe_schema())


# The examples


def test_the_example_recipe_fits_the_demo_and_its_schema(repository: Path) -> None:
    text = (IN_REPOSITORY / "sparkquant.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    jsonschema.validate(yaml.safe_load(text), recipe_schema())
    found = lint_repository(with_recipe(without_weights(repository), text))
    assert found.problems == ()


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    """Steps of the only job that run commands, with its environment; installing is not repeated here."""
    document = yaml.safe_load(workflow.read_text())
    (job,) = document["jobs"].values()
    shell = document.get("defaults", {}).get("run", {}).get("shell")
    steps = [{"shell": shell, **step, "env": {**job.get("env", {}), **step.get("env", {})}} for step in job["steps"]]
    assert all("uses" in step or "run" in step for step in steps)
    return [step for step in steps if "run" in step and step.get("name") != "install"]


def run_step(step: dict[str, Any], given: dict[str, str], cwd: Path, env: dict[str, str]) -> Any:
    """A step as the runner does it: expressions reach the environment alone, bash ends at the first failure."""
    assert "${{" not in step["run"], "an expression inside a command can be a command"
    own = {key: re.sub(r"\$\{\{ (\S+) \}\}", lambda m: given[m[1]], value) for key, value in step["env"].items()}
    flags = ["-eo", "pipefail"] if step.get("shell") == "bash" else ["-e"]
    return subprocess.run(
        ["bash", *flags, "-c", step["run"]], capture_output=True, text=True, cwd=cwd, env={**env, **own}, check=False
    )


@pytest.fixture
def path_environment(hub: RunningHub, tmp_path: Path) -> dict[str, str]:
    """An environment whose `sparkquant` is this checkout, without a token."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "sparkquant"
    from tests.cli.running import command

    script.write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    script.chmod(0o755)
    env = environment({**hub.environment(token=None), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")})
    return {**env, "PATH": f"{tmp_path / 'bin'}:{env['PATH']}"}


def test_the_lint_workflow_runs(repository: Path, path_environment: dict[str, str]) -> None:
    (step,) = steps_of(IN_REPOSITORY / ".github/workflows/recipe.yml")
    with_recipe(without_weights(repository), (IN_REPOSITORY / "sparkquant.yaml").read_text())
    assert run_step(step, {}, repository, path_environment).returncode == 0
    with_recipe(repository, MINE.replace("fp8", "fp9"))
    done = run_step(step, {}, repository, path_environment)
    assert done.returncode == 2
    assert done.stdout.startswith("::error file=sparkquant.yaml,line=1,col=10::no recipe 'qwen-hybrid-fp9'")


def test_the_hooks_run_on_the_files_that_they_name(repository: Path, path_environment: dict[str, str]) -> None:
    with_recipe(without_weights(repository))
    names = [path.relative_to(repository).as_posix() for path in repository.rglob("*")]
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()):
        files = [name for name in names if re.search(hook["files"], name)]
        assert files == ["sparkquant.yaml"]
        line = [*shlex.split(hook["entry"]), *files]
        done = subprocess.run(line, capture_output=True, text=True, cwd=repository, env=path_environment, check=False)
        assert done.returncode == 0, done.stdout
    ids = [hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())]
    used = yaml.safe_load((IN_REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert {hook["id"] for repo in used["repos"] for hook in repo["hooks"]} <= set(ids)


SMALL = {"RECIPE": "", "ROWS": "2", "TOKENS": "96"}
"""No recipe is named: the model brings its own, with a limit that a few tokens can be held against."""


@pytest.fixture
def small_source(demo_source: Path, tmp_path: Path) -> Path:
    """A model whose recipe limits the KL alone."""
    folder = tmp_path / "source"
    shutil.copytree(demo_source, folder)
    text = (recipe_folder() / "qwen-hybrid-fp8.yaml").read_text()
    return with_recipe(folder, re.sub(r"^accept: .*$", "accept: {kl_mean: 0.05}", text, flags=re.MULTILINE))


@dataclass(frozen=True)
class Call:
    """A `sparkquant ...` of a pipeline, and the token that it could see."""

    arguments: tuple[str, ...]
    token: str


@dataclass(frozen=True)
class Recorder:
    """A `sparkquant` on the PATH that notes how it is called, and fails for the verb FAIL."""

    environment: dict[str, str]
    notes: Path

    @property
    def calls(self) -> list[Call]:
        """All of them so far."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [Call(tuple(words[1:]), words[0].removeprefix("token=")) for words in map(shlex.split, lines)]


@pytest.fixture
def recorder(path_environment: dict[str, str], tmp_path: Path) -> Recorder:
    """In the place of the real command, which takes seconds to start six times."""
    note = "import shlex, sys; print(shlex.join(sys.argv[1:]))"
    (tmp_path / "bin" / "sparkquant").write_text(
        f'#!/bin/sh\n{shlex.join([sys.executable, "-S", "-I", "-c", note])} token=$HF_TOKEN "$@" >> "$NOTES"\n'
        '[ "$1" != "${FAIL:-}" ]\n'
    )
    notes = tmp_path / "calls"
    return Recorder({**path_environment, "NOTES": str(notes)}, notes)


def run_shell_pipeline(source: Path, cwd: Path, env: dict[str, str]) -> Any:
    env = {**env, **SMALL, "MODEL": str(source), "REPO": "me/demo", "HF_TOKEN": WRITER, "OUT": "out"}
    line = ["sh", str(PIPELINE / "publish.sh"), "--private", "--allow-missing", "validate"]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=env, check=False)


def run_workflow(source: Path, cwd: Path, env: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Steps with their results, up to the first that fails."""
    given = {"inputs.model": str(source), "inputs.repo": "me/demo", "inputs.vllm": "", "secrets.HF_TOKEN": WRITER}
    given |= {f"inputs.{name.lower()}": value for name, value in SMALL.items()}
    for step in steps_of(PIPELINE / ".github/workflows/publish.yml"):
        if step.get("if") == "inputs.vllm != ''":
            continue
        done = run_step(step, given, cwd, env)
        yield step["name"], done
        if done.returncode:
            return


VERBS = ["quantize", "verify", "evaluate", "publish"]


def test_what_the_pipelines_call_publishes(
    small_source: Path,
    hub: RunningHub,
    client: None,
    recorder: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands of both, with the words that the shell made of them, carried out in this process."""
    assert run_shell_pipeline(small_source, tmp_path, recorder.environment).returncode == 0
    shell = recorder.calls
    assert [call.arguments[0] for call in shell] == VERBS
    recorder.notes.unlink()
    assert [name for name, _ in run_workflow(small_source, tmp_path, recorder.environment)] == ["plan", *VERBS]
    plan, *workflow = recorder.calls
    assert plan.arguments == ("plan", str(small_source))
    assert [call.token for call in (plan, *workflow)] == ["", "", "", "", WRITER]
    assert workflow[:3] == [Call(call.arguments, "") for call in shell[:3]]
    monkeypatch.chdir(tmp_path)
    for call in (*workflow[:3], workflow[3], shell[3]):
        if call is shell[3]:
            hub.control("reset", {})
        done = invoke(*call.arguments)
        assert done.exit_code == 0, (call.arguments, done.stderr)
        assert WRITER not in done.stdout + done.stderr
        if call.arguments[0] == "publish":
            assert "status verified" in done.stdout
            assert len(hub.control("messages")["me/demo"]) == 2
            assert hub.get("/api/models/me/demo")["private"] is (call is shell[3])


@pytest.mark.parametrize("verb", VERBS)
def test_a_failed_verb_ends_the_pipelines(small_source: Path, recorder: Recorder, tmp_path: Path, verb: str) -> None:
    env = {**recorder.environment, "FAIL": verb}
    assert run_shell_pipeline(small_source, tmp_path, env).returncode != 0
    assert [call.arguments[0] for call in recorder.calls] == VERBS[: VERBS.index(verb) + 1]
    assert next(reversed([*run_workflow(small_source, tmp_path, env)]))[0] == verb


@pytest.mark.slow
def test_the_shell_pipeline_publishes(
    small_source: Path, hub: RunningHub, path_environment: dict[str, str], tmp_path: Path
) -> None:
    done = run_shell_pipeline(small_source, tmp_path, path_environment)
    assert done.returncode == 0, done.stderr
    assert "status verified" in done.stdout
    assert len(hub.control("messages")["me/demo"]) == 2
    assert hub.get("/api/models/me/demo")["private"] is True
    assert WRITER not in done.stdout + done.stderr


@pytest.mark.slow
def test_the_workflow_publishes(
    small_source: Path, hub: RunningHub, path_environment: dict[str, str], tmp_path: Path
) -> None:
    for name, done in run_workflow(small_source, tmp_path, path_environment):
        assert done.returncode == 0, (name, done.stderr)
        assert WRITER not in done.stdout + done.stderr
    assert "status verified" in (tmp_path / "summary.md").read_text()
    assert len(hub.control("messages")["me/demo"]) == 2


def test_the_token_is_in_the_last_step_alone() -> None:
    steps = steps_of(PIPELINE / ".github/workflows/publish.yml")
    assert [step["name"] for step in steps] == ["plan", "quantize", "verify", "evaluate", "validate", "publish"]
    assert [step["name"] for step in steps if "HF_TOKEN" in step["env"]] == ["publish"]
