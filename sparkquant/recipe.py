"""A recipe: which layer class gets which scheme, and what the result must show. Written by people, so strict.

Every fault of a file is found at once and reported as `file:line:col: what; hint`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from sparkquant import layouts
from sparkquant.accept import Accept
from sparkquant.errors import Problem, RecipeError
from sparkquant.frozen import Frozen
from sparkquant.layers import MINIMUM_BITS, PROTECTED, UNPROTECTABLE, LayerClass, Layout
from sparkquant.methods import OPTIONS, Method
from sparkquant.positions import Document
from sparkquant.schemes import GROUP_SIZES, KEEP, SCHEMES, Scheme, make_scheme

HINT = "`sparkquant recipes show qwen-hybrid-w4a16` prints a working recipe, `sparkquant recipes schema` all keys"
"""The next step after any fault in a recipe."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_FUSED_PARTS = {
    "attention.q": "attention.qkv", "attention.k": "attention.qkv", "attention.v": "attention.qkv",
    "linear_attention.qkv": "linear_attention.qkvz", "linear_attention.z": "linear_attention.qkvz",
    "mlp.gate": "mlp.gate_up", "mlp.up": "mlp.gate_up",
    "experts.gate": "experts.gate_up", "experts.up": "experts.gate_up",
    "shared_expert.gate": "shared_expert.gate_up", "shared_expert.up": "shared_expert.gate_up",
}  # fmt: skip


def _layer_class(value: Any) -> LayerClass:
    if isinstance(value, LayerClass):
        return value
    text = str(value)
    if text in _FUSED_PARTS:
        raise ValueError(
            f"{text!r} is not a class of its own: the engine loads these projections as one module,"
            f" which has one scheme; name {_FUSED_PARTS[text]!r}"
        )
    try:
        return LayerClass(text)
    except ValueError:
        near = difflib.get_close_matches(text, list(LayerClass), n=1)
        known = ", ".join(LayerClass)
        raise ValueError(
            f"no layer class {text!r}" + (f"; did you mean {str(near[0])!r}?" if near else f"; known: {known}")
        ) from None


def _scheme(value: Any) -> Scheme | None:
    if isinstance(value, Scheme):
        return value
    if value is None:
        raise ValueError(f"no scheme is written here: name one, or `{KEEP}`")
    if isinstance(value, str):
        return None if value == KEEP else make_scheme(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"a scheme is a name ({', '.join([*SCHEMES, KEEP])}) or a map with `scheme:` and options")
    unknown = sorted(map(str, set(value) - {"scheme", "group_size", "symmetric"}))
    if unknown:
        near = difflib.get_close_matches(unknown[0], ["scheme", "group_size", "symmetric"], n=1)
        raise ValueError(f"unknown option {unknown[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    name, group_size, symmetric = value.get("scheme"), value.get("group_size"), value.get("symmetric")
    if not isinstance(name, str):
        raise ValueError("`scheme:` must be a scheme name")
    if group_size is not None and type(group_size) is not int:
        raise ValueError(f"group_size must be a whole number, not {group_size!r}")
    if symmetric is not None and type(symmetric) is not bool:
        raise ValueError(f"symmetric must be true or false, not {symmetric!r}")
    if name == KEEP:
        if len(value) > 1:
            raise ValueError("`keep` has no options")
        return None
    return make_scheme(name, group_size=group_size, symmetric=symmetric)


def _eight_bits(value: Scheme | None) -> Scheme | None:
    if value is not None and value.bits < 8:
        raise ValueError(f"{value.name} here is refused: a protected class never goes below 8 bits")
    return value


def scheme_json_schema(*, bits: int) -> dict[str, Any]:
    names = {"type": "string", "enum": [*(scheme.name for scheme in SCHEMES.values() if scheme.bits >= bits), KEEP]}
    options = {"group_size": {"type": "integer", "enum": [-1, *GROUP_SIZES]}, "symmetric": {"type": "boolean"}}
    spelled_out = {
        "type": "object",
        "properties": {"scheme": names, **options},
        "required": ["scheme"],
        "additionalProperties": False,
    }
    return {"oneOf": [names, spelled_out]}


ClassName = Annotated[LayerClass, BeforeValidator(_layer_class)]
SchemeSpec = Annotated[Any, BeforeValidator(_scheme), Field(json_schema_extra=scheme_json_schema(bits=4))]
EightBitScheme = Annotated[
    Any, BeforeValidator(_scheme), AfterValidator(_eight_bits), Field(json_schema_extra=scheme_json_schema(bits=8))
]
Reason = Annotated[str, Field(min_length=8, description="why, in a sentence: it appears in the plan")]


def _versions(value: Any) -> Any:
    if isinstance(value, float | int) and not isinstance(value, bool):
        raise ValueError(f'write capability as text: "{value}" (a number loses trailing zeros)')
    return value


class Target(_Strict):
    """Where the checkpoint is going to run."""

    engine: Literal["vllm"] = "vllm"
    kernel: Literal["marlin", "any"] = "marlin"
    capability: Annotated[str, BeforeValidator(_versions), Field(pattern=r"^\d{1,2}\.\d$")] = "12.1"
    tensor_parallel: tuple[Annotated[int, Field(ge=1, le=64)], ...] = (1,)

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class CalibrationSpec(_Strict):
    """Which rows a calibrated method sees: a shipped mix or a path, how many, and their longest length in tokens."""

    mix: Annotated[str, Field(min_length=1)] = "coding-agent"
    rows: Annotated[int, Field(ge=1, le=100_000)] | None = None
    tokens: Annotated[int, Field(ge=16, le=1_000_000)] | None = None


class Override(_Strict):
    """Another scheme for some layers of one class."""

    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    layer_class: ClassName = Field(alias="class")
    scheme: SchemeSpec
    why: Reason

    @field_validator("layers", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Unprotect(_Strict):
    """Permission to store a protected class in 8 bits."""

    scheme: EightBitScheme
    why: Reason


class Recipe(_Strict):
    """A validated recipe. `source` tells where it came from, `text` is the file verbatim ("" for built recipes)."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,79}$")]
    summary: Annotated[str, Field(min_length=8)]
    families: Annotated[tuple[str, ...], Field(min_length=1)]
    target: Target = Target()
    schemes: Annotated[dict[ClassName, SchemeSpec], Field(min_length=1), AfterValidator(Frozen)]
    method: Method = Method()
    calibration: CalibrationSpec = CalibrationSpec()
    accept: Accept = Accept()
    overrides: tuple[Override, ...] = ()
    unprotect: Annotated[dict[ClassName, Unprotect], Field(validate_default=True), AfterValidator(Frozen)] = {}
    source: Annotated[str, Field(exclude=True)] = ""
    text: Annotated[str, Field(exclude=True)] = ""

    @field_validator("families", "overrides", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def as_json(self) -> dict[str, Any]:
        """The recipe fully resolved, as plain JSON: what the plan records and what its digest covers."""

        def spelled(scheme: Scheme | None) -> Any:
            return KEEP if scheme is None else scheme.as_json()

        return {
            "name": self.name,
            "summary": self.summary,
            "families": list(self.families),
            "target": self.target.model_dump(mode="json"),
            "schemes": {str(c): spelled(s) for c, s in sorted(self.schemes.items())},
            "method": self.method.as_json(),
            **({"calibration": self.calibration.model_dump(mode="json")} if self.method.calibrated else {}),
            "accept": self.accept.model_dump(mode="json", exclude_none=True),
            "overrides": [
                {"layers": list(o.layers), "class": str(o.layer_class), "scheme": spelled(o.scheme), "why": o.why}
                for o in self.overrides
            ],
            "unprotect": {
                str(c): {"scheme": spelled(u.scheme), "why": u.why} for c, u in sorted(self.unprotect.items())
            },
        }

    def with_method(self, method: str | Mapping[str, Any]) -> Recipe:
        """The same recipe with another method, by name or with options; RecipeError when there is none like it."""
        if method == self.method.name:
            return self
        wanted = _method_fields(method)
        fields = self.as_json() | {"method": wanted, "calibration": self.calibration.model_dump(mode="json")}
        return parse_recipe(fields, source=self.source, text=self.text, where="--method")


def _method_fields(method: str | Mapping[str, Any]) -> Any:
    """A method as the command line spells it: `gptq`, or `{name: gptq, correction: 0.3}`."""
    if isinstance(method, str) and method.lstrip().startswith("{"):
        return Document(method, "--method").value
    return {"name": method} if isinstance(method, str) else dict(method)


def _known_keys(path: tuple[Any, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "target": Target, "method": Method, "accept": Accept, "overrides": Override, "unprotect": Unprotect,
        "calibration": CalibrationSpec,
    }  # fmt: skip
    if not path:
        return [name for name in Recipe.model_fields if name not in ("source", "text")] + ["extends"]
    model = models.get(str(path[0]))
    if model is Method:
        return ["name", *dict.fromkeys(option for options in OPTIONS.values() for option in options)]
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _unknown_key(path: tuple[Any, ...], document: Document) -> Problem:
    known = _known_keys(path[:-1])
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return Problem(document.place(path, key=True), f"unknown key {'.'.join(map(str, path))!r}", hint)


def _problem(error: ErrorDetails, document: Document) -> Problem:
    path = tuple(part for part in error["loc"] if part != "[key]")
    where = document.place(path, key=error["loc"][-1:] == ("[key]",))
    dotted = ".".join(map(str, path))
    named = "" if document.plain else f"{dotted}: "
    if error["type"] == "extra_forbidden":
        return _unknown_key(path, document)
    if error["type"] == "missing":
        return Problem(where, f"{dotted!r} is missing")
    what = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        options = str(error.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        near = difflib.get_close_matches(error["input"], options, n=1)
        return Problem(where, named + what, f"did you mean {near[0]!r}?" if near else "")
    return Problem(where, named + what if error["type"] != "value_error" else what)


def _independent(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without the complaint that a list is too short because its faulty entries were left out."""
    return [
        detail
        for detail in details
        if detail["type"] != "too_short"
        or not any(d is not detail and d["loc"][: len(detail["loc"])] == detail["loc"] for d in details)
    ]


def _sound_part(fields: Mapping[str, Any], details: list[ErrorDetails]) -> Recipe | None:
    """What remains of a recipe without its faulty entries, so that faults of meaning are found in the same run."""
    rest: dict[Any, Any] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in fields.items()}
    for detail in details:
        key, *inner = detail["loc"]
        if key in ("schemes", "unprotect") and inner and isinstance(rest.get(key), dict):
            rest[key].pop(inner[0], None)
        else:
            rest.pop(key, None)
    blank = {"name": "blank", "summary": "a placeholder", "families": layouts.family_names()}
    rest["schemes"] = rest.get("schemes") or {LayerClass.LM_HEAD: KEEP}
    try:
        return Recipe.model_validate(blank | rest)
    except ValidationError:
        return None


def _never_quantized(found: Sequence[Layout]) -> dict[LayerClass, str]:
    """Classes that no engine loads quantized in any of the families that have them, with the reason.

    Not lm_head: recipes for several families name it, and the plan keeps and notes it where it cannot be quantized.
    """
    reasons: dict[LayerClass, str] = {}
    for layout in found:
        reasons |= {c: reason for c, reason in layout.never_quantized.items() if c is not LayerClass.LM_HEAD}
    having = {c: [layout for layout in found if c in layout.linear_classes] for c in reasons}
    return {c: reason for c, reason in reasons.items() if all(c in layout.never_quantized for layout in having[c])}


def _semantics(recipe: Recipe, document: Document) -> Iterator[Problem]:
    """Faults that need more than one field: protected classes, classes that no family has, overlapping overrides."""
    families = [name for name in recipe.families if name in layouts.family_names()]
    for index, family in enumerate(recipe.families):
        if family not in families:
            near = difflib.get_close_matches(family, layouts.family_names(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(layouts.family_names())}"
            yield Problem(document.place(("families", index)), f"no family {family!r}", hint)
    found = [layouts.family_layout(name) for name in families]
    possible = frozenset().union(*(layout.linear_classes for layout in found))
    never = _never_quantized(found)
    spots: list[tuple[tuple[Any, ...], LayerClass, Scheme | None]] = [
        (("schemes", str(c)), c, scheme) for c, scheme in recipe.schemes.items()
    ]
    spots += [(("overrides", i, "class"), o.layer_class, o.scheme) for i, o in enumerate(recipe.overrides)]
    for path, layer_class, scheme in spots:
        where = document.place(path, key=True)
        if scheme is not None and layer_class in PROTECTED:
            hint = "remove the line"
            if layer_class in UNPROTECTABLE:
                hint += f", or allow 8 bits with `unprotect: {{{layer_class}: {{scheme: fp8, why: ...}}}}`"
            yield Problem(where, f"{layer_class} is protected: {PROTECTED[layer_class]}", hint)
        elif families and layer_class not in possible and layer_class not in PROTECTED:
            yield Problem(where, f"none of {', '.join(families)} has the class {layer_class}", "remove the line")
        elif scheme is not None and layer_class in never:
            yield Problem(where, f"{layer_class} stays 16-bit: {never[layer_class]}", "remove the line")
        if scheme is not None and scheme.bits < MINIMUM_BITS.get(layer_class, (0, ""))[0]:
            least, why = MINIMUM_BITS[layer_class]
            yield Problem(where, f"{layer_class} never goes below {least} bits: {why}", "write fp8, w8a16 or keep")
    for layer_class in recipe.unprotect:
        if layer_class not in UNPROTECTABLE:
            allowed = ", ".join(sorted(UNPROTECTABLE))
            yield Problem(
                document.place(("unprotect", str(layer_class)), key=True),
                f"{layer_class} cannot be unprotected",
                f"only {allowed} can; other classes take schemes under `schemes:` or stay 16-bit",
            )
    taken: dict[tuple[LayerClass, int], int] = {}
    for index, override in enumerate(recipe.overrides):
        for layer in override.layers:
            other = taken.setdefault((override.layer_class, layer), index)
            if other != index:
                where = document.place(("overrides", index))
                yield Problem(where, f"layer {layer} of {override.layer_class} is overridden twice", "keep one")


def parse_recipe(
    fields: Mapping[str, Any],
    *,
    source: str = "",
    text: str = "",
    where: str = "",
    document: Document | None = None,
    baseless: Sequence[Problem] = (),
) -> Recipe:
    """Validate plain data; RecipeError with every fault at once. `baseless` says why a base to extend is not there."""
    label = where or source or "recipe"
    document = document or Document(None if where else text or None, label)
    problems = [*baseless, *document.duplicates, *document.odd_keys, *document.unreadable]
    problems += (_unknown_key((key,), document) for key in ("source", "text") if key in fields)
    fields = {key: value for key, value in fields.items() if key not in ("source", "text")}
    recipe: Recipe | None
    try:
        recipe = Recipe.model_validate({**fields, "source": source, "text": text})
    except ValidationError as error:
        details = _independent(error.errors(include_url=False))
        found = (_problem(d, document) for d in details if d["type"] != "invalid_key" or not document.odd_keys)
        inherited = {f"{key!r} is missing" for key in Recipe.model_fields} if baseless else set()
        told = {problem.where for problem in document.unreadable}
        problems += (p for p in found if p.what not in inherited and p.where not in told)
        recipe = _sound_part(fields, details)
    problems += _semantics(recipe, document) if recipe else ()
    if problems or recipe is None:
        raise RecipeError(f"{label}: {len(problems)} fault{'s' * (len(problems) > 1)}", hint=HINT, problems=problems)
    return recipe
