"""Scheme arithmetic: stored tensors equal those of compressed-tensors, and `problem` answers for any shape."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkquant.schemes import DTYPE_BYTES, FP8_BLOCK, GROUP_SIZES, KEEP, SCHEMES, OutputTensor, Scheme, make_scheme

ALL = [
    *SCHEMES.values(),
    *(make_scheme("w4a16", group_size=g) for g in (-1, 32, 64)),
    *(make_scheme("w4a16", group_size=g, symmetric=False) for g in (-1, 32, 128)),
    *(make_scheme("w8a16", group_size=g) for g in (-1, 32)),
]


def _named(scheme: Scheme) -> str:
    return scheme.label


schemes = st.sampled_from(ALL)
shapes = st.lists(st.integers(-3, 600) | st.sampled_from([0, 128, 256, 4096, 2**40]), max_size=4).map(tuple)
matrices = st.tuples(st.integers(1, 64).map(lambda n: 8 * n), st.integers(1, 24).map(lambda n: 32 * n))


@given(schemes, shapes, st.integers(-3, 70), st.booleans())
def test_problem_never_raises_and_only_matrices_pass(
    scheme: Scheme, shape: tuple[int, ...], tp: int, row_parallel: bool
) -> None:
    reason = scheme.problem(shape, tp=tp, row_parallel=row_parallel)
    assert reason is None or (isinstance(reason, str) and len(reason) > 8)
    if len(shape) != 2 or min(shape) < 1 or tp < 1:
        assert reason is not None


@given(schemes, matrices)
def test_what_passes_has_whole_positive_outputs(scheme: Scheme, shape: tuple[int, int]) -> None:
    if scheme.problem(shape) is not None:
        return
    outputs = scheme.outputs(shape)
    assert [tensor.name for tensor in outputs] == sorted({tensor.name for tensor in outputs})
    assert all(size > 0 for tensor in outputs for size in tensor.shape)
    assert scheme.bytes(shape) == sum(math.prod(t.shape) * DTYPE_BYTES[t.dtype] for t in outputs)
    n, k = shape
    codes = {t.name: t for t in outputs}
    code = codes.get("weight_packed") or codes["weight"]
    assert 8 * code.bytes == scheme.bits * n * k, "codes take exactly their bits"
    if scheme.is_integer and scheme.group_size != -1:
        assert codes["weight_scale"].shape == (n, k // scheme.group_size)


@given(schemes, matrices, st.sampled_from([2, 3, 4, 8]), st.booleans())
def test_a_rank_holds_whole_words_groups_and_blocks(
    scheme: Scheme, shape: tuple[int, int], tp: int, row_parallel: bool
) -> None:
    if scheme.problem(shape) is not None or scheme.problem(shape, tp=tp, row_parallel=row_parallel) is not None:
        return
    n, k = shape
    part = (n, k // tp) if row_parallel else (n // tp, k)
    assert (part[0] * part[1]) * tp == n * k
    assert scheme.problem(part) is None, "what one rank holds is a valid Linear of its own"
    for whole, own in zip(scheme.outputs(shape), scheme.outputs(part), strict=True):
        replicated = scheme.group_size == -1 and row_parallel and whole.name in ("weight_scale", "weight_zero_point")
        shared = whole.name in ("weight_shape", "weight_global_scale") or replicated
        if scheme.name == "fp8" and row_parallel and whole.name == "weight_scale":
            shared = True
        assert own.bytes == (whole.bytes if shared else whole.bytes // tp), whole.name


@pytest.mark.parametrize(
    ("scheme", "shape", "options", "reason"),
    [
        (make_scheme("w4a16"), (8, 192), {}, "K=192 is not a multiple of the group size 128"),
        (make_scheme("w4a16", group_size=-1), (8, 20), {}, "K=20 is not a multiple of 8"),
        (make_scheme("w8a16", group_size=-1), (8, 6), {}, "K=6 is not a multiple of 4"),
        (make_scheme("w4a16", symmetric=False), (12, 128), {}, "N=12 is not a multiple of 8: zero points"),
        (make_scheme("nvfp4a16"), (8, 24), {}, "K=24 is not a multiple of 16"),
        (make_scheme("fp8"), (8,), {}, "fp8 needs a matrix, this tensor is [8]"),
        (make_scheme("fp8"), (4, 8, 8), {}, "fp8 needs a matrix, this tensor is [4, 8, 8]"),
        (make_scheme("fp8"), (0, 8), {}, "fp8 needs a matrix"),
        (make_scheme("fp8"), (9, 8), {"tp": 2}, "N=9 does not divide over 2 ranks"),
        (make_scheme("fp8"), (8, 9), {"tp": 2, "row_parallel": True}, "K=9 does not divide over 2 ranks"),
        (make_scheme("fp8"), (8, 8), {"tp": 0}, "tensor-parallel size 0 is not positive"),
        (make_scheme("w4a16"), (8, 128), {"tp": 2, "row_parallel": True}, "K=128 over 2 ranks = 64 is not a multiple"),
        (make_scheme("w4a16", group_size=-1), (8, 24), {"tp": 2, "row_parallel": True}, "K=24 over 2 ranks = 12"),
        (make_scheme("w4a16", symmetric=False), (24, 128), {"tp": 2}, "N=12 is not a multiple of 8: zero points"),
        (make_scheme("nvfp4a16"), (8, 48), {"tp": 2, "row_parallel": True}, "K=48 over 2 ranks = 24 is not"),
        (make_scheme("fp8_block"), (384, 128), {"tp": 2}, "a rank's part [192, 128] cuts a 128x128 block"),
    ],
)  # fmt: skip
def test_reasons(scheme: Scheme, shape: tuple[int, ...], options: dict[str, int], reason: str) -> None:
    found = scheme.problem(shape, tp=int(options.get("tp", 1)), row_parallel=bool(options.get("row_parallel")))
    assert found is not None
    assert found.startswith(reason)


def test_shapes_of_the_published_models_pass_where_they_are_known_to() -> None:
    int4, nvfp4, fp8 = make_scheme("w4a16"), make_scheme("nvfp4a16"), make_scheme("fp8")
    for n, k in ((17408, 5120), (5120, 17408), (12288, 5120), (1024, 5120), (5120, 6144), (248320, 5120), (512, 2048)):
        assert [s.problem((n, k)) for s in (int4, nvfp4, fp8)] == [None, None, None]
    vision = (1152, 4304)
    assert int4.problem(vision) == "K=4304 is not a multiple of the group size 128"
    assert nvfp4.problem(vision) is None
    narrow = (2688, 1856)
    assert int4.problem(narrow) is not None
    assert make_scheme("w4a16", group_size=64).problem(narrow) is None
    assert fp8.problem((9, 7)) is None, "FP8 has one scale a row and takes any matrix"


def test_block_fp8_rounds_its_scale_grid_up() -> None:
    scales = {t.name: t.shape for t in SCHEMES["fp8_block"].outputs((130, 257))}
    assert scales == {"weight": (130, 257), "weight_scale": (2, 3)}
    assert FP8_BLOCK == 128


@pytest.mark.parametrize("scheme", ALL, ids=_named)
def test_outputs_equal_what_compressed_tensors_stores(scheme: Scheme) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        initialize_module_for_quantization,
        preset_name_to_scheme,
    )

    n, k = 256, 384
    presets = {"nvfp4a16": "NVFP4A16", "fp8": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK"}
    if scheme.is_integer:
        strategy = (
            {"strategy": "channel"}
            if scheme.group_size == -1
            else {"strategy": "group", "group_size": scheme.group_size}
        )
        weights = QuantizationArgs(num_bits=scheme.bits, type="int", symmetric=scheme.symmetric, **strategy)
        reference = QuantizationScheme(targets=["Linear"], weights=weights)
    else:
        reference = preset_name_to_scheme(presets[scheme.name], ["Linear"])
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    initialize_module_for_quantization(linear, reference)
    with torch.no_grad():
        for name, value in linear.named_parameters():
            if name != "weight":
                value.fill_(0 if "zero_point" in name else 1)
    compress_module(linear)
    kinds = {"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32,
             "F8_E4M3": torch.float8_e4m3fn}  # fmt: skip
    stored = {name: (value.dtype, tuple(value.shape)) for name, value in linear.state_dict().items()}
    assert {t.name: (kinds[t.dtype], t.shape) for t in scheme.outputs((n, k))} == stored
    assert scheme.bytes((n, k)) == sum(value.numel() * value.element_size() for value in linear.state_dict().values())
    assert linear.quantization_scheme.format.value == scheme.format


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("w4a61", {}, "no scheme 'w4a61'; did you mean 'w4a16'?"),
        ("nvfp4", {}, "did you mean 'nvfp4a16'?"),
        ("kep", {}, f"did you mean {KEEP!r}?"),
        ("int4-awq", {}, "known: w4a16, w8a16, nvfp4a16, fp8, fp8_block, keep"),
        ("", {}, "known: w4a16"),
        ("fp8", {"group_size": 128}, "fp8 has no options"),
        ("nvfp4a16", {"symmetric": True}, "nvfp4a16 has no options"),
        ("w4a16", {"group_size": 16}, "group_size 16 is not one of -1, 32, 64, 128: Marlin refuses others"),
        ("w4a16", {"group_size": 0}, "group_size 0 is not one of"),
        ("w4a16", {"group_size": -2}, "group_size -2 is not one of"),
        ("w8a16", {"symmetric": False}, "w8a16 is symmetric only"),
    ],
)  # fmt: skip
def test_make_scheme_says_what_is_wrong(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_scheme(name, **options)  # type: ignore[arg-type]


def test_make_scheme_resolves_options_and_labels_tell_schemes_apart() -> None:
    assert make_scheme("w4a16") == SCHEMES["w4a16"]
    assert make_scheme("w4a16", group_size=64, symmetric=False).label == "w4a16 g64 asym"
    assert make_scheme("w8a16", group_size=-1).label == "w8a16 row"
    assert len({scheme.label for scheme in ALL}) == len(set(ALL))
    for scheme in ALL:
        fields = scheme.as_json()
        assert make_scheme(fields.pop("scheme"), **fields) == scheme
    assert set(GROUP_SIZES) == {32, 64, 128}


def test_dtype_table_agrees_with_torch_and_safetensors() -> None:
    torch = pytest.importorskip("torch")
    names = pytest.importorskip("safetensors.torch")._TYPES
    known = {name: DTYPE_BYTES[name] for name in names if name in DTYPE_BYTES}
    assert known == {name: torch.empty((), dtype=names[name]).element_size() for name in known}
    assert {"BF16", "F16", "F32", "I32", "I64", "U8", "F8_E4M3", "BOOL"} <= known.keys()
    assert OutputTensor("x", "BF16", (3, 5)).bytes == 30
