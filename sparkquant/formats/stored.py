"""What a checkpoint stores for a module: its tensors by suffix, and the scheme that they are read with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparkquant.checkpoint import Checkpoint, TensorHeader
from sparkquant.formats.storage import Storage, codes_suffix, matrix_of, tensors_of
from sparkquant.schemes import OutputTensor, Scheme

SUFFIXES = (
    "weight_packed", "weight_scale", "weight_global_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    "weight_scale_inv", "weight_scale_2", "input_scale", "input_global_scale", "input_zero_point", "g_idx",
    "qweight", "qzeros", "scales", "pre_quant_scale",
)  # fmt: skip
"""Names below a module that only quantized modules have."""

SCALE_DTYPES = ("BF16", "F16", "F32")
"""Float scales of any producer; ours are BF16."""


def split_name(name: str) -> tuple[str, str]:
    """(module, suffix) of a stored tensor; the suffix is "" for a parameter without one, such as `A_log`."""
    module, _, suffix = name.rpartition(".")
    return (module, suffix) if suffix == "weight" or suffix in SUFFIXES else (name, "")


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """A scheme as some producer declares it: ours, or a relative of ours.

    scheme      the scheme of this project that stands for the same arithmetic
    per_tensor  FP8 with one scale for the whole matrix
    inputs      activations: `none`, `dynamic`, or `static` (a stored input scale)
    storage     the producer's names, packing and scale convention
    """

    scheme: Scheme
    per_tensor: bool = False
    inputs: str = "none"
    storage: Storage = Storage.COMPRESSED_TENSORS

    @property
    def label(self) -> str:
        """Short unique text."""
        text = "fp8 tensor" if self.per_tensor else self.scheme.label
        return text + (" with static activations" if self.inputs == "static" else "")

    @property
    def codes(self) -> str:
        """Suffix of the tensor that holds the codes."""
        return codes_suffix(self.scheme, self.storage)

    def outputs(self, shape: tuple[int, ...]) -> tuple[OutputTensor, ...]:
        """The tensors required for a Linear [N, K], names relative to the module."""
        return tensors_of(self.scheme, self.storage, shape, per_tensor=self.per_tensor, static=self.inputs == "static")

    def shape_of(self, tensors: Mapping[str, TensorHeader]) -> tuple[int, int] | None:
        """[N, K] as the stored codes imply it, None when they are absent or no matrix."""
        codes = tensors.get(self.codes)
        if codes is None or len(codes.shape) != 2:
            return None
        return matrix_of(self.scheme, self.storage, codes.shape)


@dataclass(frozen=True)
class StoredModule:
    """One module: `tensors` by suffix (`weight`, `weight_scale` ...; "" for a bare parameter).

    scheme  how the config says that they are read; None for plain weights
    """

    name: str
    tensors: Mapping[str, TensorHeader] = field(default_factory=dict)
    scheme: StoredScheme | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the tensors themselves are of the quantized kind, whatever a config says."""
        codes = self.tensors.get("weight")
        return any(s in SUFFIXES for s in self.tensors) or (codes is not None and codes.dtype[:2] in ("F8", "I8", "U8"))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the weight that the tensors stand for; None when they do not say."""
        if self.scheme is not None:
            return self.scheme.shape_of(self.tensors)
        plain = self.tensors.get("weight", self.tensors.get(""))
        return None if plain is None else plain.shape


def modules_of(tensors: Mapping[str, TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    """Tensors by module and suffix. A name without a suffix is a module of its own."""
    found: dict[str, dict[str, TensorHeader]] = {}
    for name, header in tensors.items():
        module, suffix = split_name(name)
        found.setdefault(module, {})[suffix] = header
    return found


def plain_modules(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> dict[str, StoredModule]:
    """The modules of a checkpoint without any scheme."""
    grouped = modules_of(checkpoint.tensors)
    return {name: StoredModule(name, grouped[name]) for name in (grouped if names is None else names)}
