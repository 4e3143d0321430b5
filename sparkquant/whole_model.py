"""The whole language model in memory, for quantizers that cannot take it block by block.

The text-only class of the family, filled from wherever weights are read: no draft head, no towers, every parameter in
the dtype that the checkpoint stores. What is not in it is copied from the source by the writer, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError, EnvironmentMissing, Problem
from sparkquant.layers import Layout
from sparkquant.live import live_view
from sparkquant.stream import parameters_on_meta
from sparkquant.weights import StoredWeights


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix that a plan quantizes: the tensor of the checkpoint that holds it, and its name in a live model."""

    tensor: str
    module: str
    live: str


def whole_model(checkpoint: Checkpoint, weights: StoredWeights, layout: Layout) -> nn.Module:
    """The text-only model with its weights. CheckpointError names every parameter that the checkpoint does not fill."""
    model: Any = _text_skeleton(checkpoint)
    stored = [(name, checkpoint.tensors[name]) for name in weights.names() if name in checkpoint.tensors]
    state = dict(model.state_dict())
    dtypes = {live_view(name, state, layout)[0]: _dtype(header.dtype) for name, header in stored}
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        filled = nn.Parameter(torch.empty(parameter.shape, dtype=dtypes.get(name, torch.bfloat16)), requires_grad=False)
        setattr(model.get_submodule(owner), leaf, filled)
    model.tie_weights()
    _fill(model, [name for name, _ in stored], weights, layout)
    whole: nn.Module = model.eval()
    return whole


def _dtype(name: str) -> torch.dtype:
    return {"F32": torch.float32, "F16": torch.float16}.get(name, torch.bfloat16)


def _text_skeleton(checkpoint: Checkpoint) -> Any:
    """The causal class of the text part: parameters on the meta device, buffers real."""
    try:
        import transformers
    except ImportError:
        raise EnvironmentMissing(
            "transformers is not installed, and running a model needs it", hint='pip install "sparkquant[calibration]"'
        ) from None
    config = transformers.AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False).get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = classes.get(type(config), None)
    if model_class is None:
        raise EnvironmentMissing(
            f"transformers {transformers.__version__} has no text-only class for {type(config).__name__}",
            hint="use a native method: rtn, mse, imatrix, gptq",
        )
    with parameters_on_meta():
        return model_class._from_config(config, dtype=torch.bfloat16)


def _fill(model: nn.Module, names: Sequence[str], weights: StoredWeights, layout: Layout) -> None:
    state = dict(model.state_dict())
    filled = dict.fromkeys(state, 0)
    with torch.no_grad():
        for name in names:
            key, view = live_view(name, state, layout)
            if key is None or view is None:
                continue
            source = weights.read(name)
            if source.shape != view.shape:
                what = f"{name} is {list(source.shape)}, the model class wants {list(view.shape)}"
                raise CheckpointError(what, hint="does config.json belong to these weights?")
            view.copy_(source)
            filled[key] += source.numel()
    shared: dict[int, int] = {}
    for key, count in filled.items():
        shared[state[key].data_ptr()] = max(shared.get(state[key].data_ptr(), 0), count)
    buffers = {name for name, _ in model.named_buffers()}
    empty = [key for key in state if key not in buffers and shared[state[key].data_ptr()] != state[key].numel()]
    if empty:
        raise CheckpointError(
            f"the checkpoint does not fill {len(empty)} parameters of {type(model).__name__}",
            hint="is this checkpoint complete?",
            problems=[Problem(key, "has no weights") for key in empty],
        )


def linears(decisions: Sequence[Mapping[str, Any]], model: nn.Module, layout: Layout) -> Iterator[tuple[int, Linear]]:
    """(position of the decision, matrix) of everything that is quantized; fused experts one by one.

    Names of experts are those after `split_experts`. CheckpointError names every matrix that the live model lacks.
    """
    state = dict(model.state_dict())
    lost: list[Problem] = []
    for position, decision in enumerate(decisions):
        tensor, module = decision["tensor"], decision["module"]
        key, view = live_view(tensor, state, layout)
        if key is None or view is None:
            lost.append(Problem(tensor, "is not in the live model"))
        elif decision["parts"]:
            parent, live = module.rpartition(".")[0], key.rpartition(".")[0]
            for expert in range(decision["experts"]):
                for part in decision["parts"]:
                    yield position, Linear(tensor, f"{parent}.{expert}.{part}", f"{live}.{expert}.{part}")
        elif state[key].dim() == 3:
            yield position, Linear(tensor, module, _expert_name(key, state[key], view))
        elif state[key].shape != view.shape:
            lost.append(Problem(tensor, f"is only a part of {key} in the live model"))
        else:
            yield position, Linear(tensor, module, key.removesuffix(".weight"))
    if lost:
        what = f"{type(model).__name__} has no Linear for {len(lost)} matrices of the plan"
        raise CheckpointError(what, hint="use a native method: rtn, mse, imatrix, gptq", problems=lost)


def _expert_name(key: str, stacked: Tensor, view: Tensor) -> str:
    """The name of an expert's matrix, from where it lies in the stacked tensor."""
    place = (view.data_ptr() - stacked.data_ptr()) // stacked.element_size()
    expert, inside = divmod(place, stacked[0].numel())
    experts, _, leaf = key.rpartition(".")
    part = {"gate_up_proj": "up_proj" if inside else "gate_proj"}.get(leaf, leaf)
    return f"{experts}.{expert}.{part}"


class _Expert(nn.Module):
    """One expert, with or without a gate."""

    def __init__(self, into: Tensor, down: Tensor, act_fn: Any, *, gated: bool) -> None:
        super().__init__()
        gate, up = into.chunk(2, dim=0) if gated else (None, into)
        self.gate_proj = None if gate is None else _linear(gate)
        self.up_proj, self.down_proj = _linear(up), _linear(down)
        self.act_fn = act_fn

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.up_proj(hidden)
        inner = self.act_fn(up) if self.gate_proj is None else self.act_fn(self.gate_proj(hidden)) * up
        down: Tensor = self.down_proj(inner)
        return down


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


class SplitExperts(nn.ModuleList):
    """Stacked experts as one Linear each, over the same memory: quantizers look for Linears by name."""

    def __init__(self, stacked: Any) -> None:
        gated = hasattr(stacked, "gate_up_proj")
        into = stacked.gate_up_proj if gated else stacked.up_proj
        pairs = zip(into.data, stacked.down_proj.data, strict=True)
        super().__init__(_Expert(matrix, down, stacked.act_fn, gated=gated) for matrix, down in pairs)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Each token through its experts, weighted."""
        result = torch.zeros_like(hidden)
        chosen = functional.one_hot(top_k_index, len(self)).permute(2, 1, 0)
        for index, expert in enumerate(self):
            rank, token = torch.where(chosen[index])
            if token.numel():
                part = expert(hidden[token]) * top_k_weights[token, rank, None]
                result.index_add_(0, token, part.to(result.dtype))
        return result


def split_experts(model: nn.Module) -> None:
    """Replace every module of stacked expert matrices."""
    for name, module in list(model.named_modules()):
        into = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
        if isinstance(into, nn.Parameter) and into.dim() == 3 and isinstance(module.down_proj, nn.Parameter):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, SplitExperts(module))
