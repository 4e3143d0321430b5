"""Run a transformers model block by block: load a block, send every row through it, free it. Peak memory is one block.

The skeleton is transformers' own class with its parameters on the meta device; weights come from wherever `Weights`
reads them (source shards, or a quantized checkpoint dequantized on the way). Masks and positions are not rebuilt here:
the model's own forward runs once per batch shape with its blocks replaced by recorders, so each block gets exactly the
arguments that the library computes for its kind of layer.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparkquant.checkpoint import Checkpoint
from sparkquant.errors import CheckpointError, EnvironmentMissing
from sparkquant.layers import LayerClass, Layout
from sparkquant.layouts import layout_for
from sparkquant.live import live_view


class Weights(Protocol):
    """Where the stream takes weights from."""

    def names(self) -> Sequence[str]:
        """16-bit checkpoint names of every tensor that can be read."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor under its 16-bit name and shape, in any floating dtype."""
        ...


@dataclass
class Batch:
    """Rows run together, right-padded: `rows` are their indices, `valid` [B, L] is False where `ids` [B, L] is padding.

    Padding on the right changes nothing for the tokens before it (attention and recurrences are causal), so it needs no
    mask inside the model; statistics must leave its positions out. `hidden` [B, L, H] is what the next block gets.
    """

    rows: tuple[int, ...]
    ids: Tensor
    valid: Tensor
    hidden: Tensor

    def without_states(self) -> Batch:
        """The same rows without their states, and without the memory of them, which a slice would hold on to."""
        return replace(self, hidden=self.hidden.new_empty(0))


PADDING_SHARE = 0.1
"""Rows run together when at most this share of a batch is padding."""


def group_rows(lengths: Sequence[int], *, tokens: int) -> list[tuple[int, ...]]:
    """Indices of rows that run together: similar lengths, at most `tokens` positions (one row at least)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    for index in order:
        longest = lengths[groups[-1][0]] if groups else 0
        padded = longest * (len(groups[-1]) + 1) if groups else 0
        real = sum(lengths[i] for i in groups[-1]) + lengths[index] if groups else 0
        if groups and padded <= tokens and padded - real <= PADDING_SHARE * padded:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [tuple(group) for group in groups]


_Calls = dict[int, tuple[tuple[Any, ...], dict[str, Any]]]


class _Recorder(nn.Module):
    """Stands in for a block: keeps its arguments, passes the hidden states through."""

    def __init__(self, block: nn.Module, index: int, calls: _Calls) -> None:
        super().__init__()
        self._index, self._calls = index, calls
        # Models look at these when they choose a block's mask.
        for name in ("layer_type", "block_type", "attention_type", "is_linear", "layer_idx"):
            if hasattr(block, name):
                setattr(self, name, getattr(block, name))

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._calls[self._index] = (args, kwargs)
        return hidden


class StreamedModel:
    """One model, run block by block over batches of rows.

    device, dtype   where and in which precision blocks run; float32 on a CPU is exact enough to compare with the source
    """

    def __init__(
        self, checkpoint: Checkpoint, weights: Weights, *, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.layout: Layout = layout_for(checkpoint.config)
        self.device, self.dtype = torch.device(device), dtype
        self._weights = weights
        self._model: Any = skeleton(checkpoint)
        for module in self._model.modules():  # rotary tables do not follow their input's device
            module._buffers.update(
                {name: None if b is None else b.to(self.device) for name, b in module._buffers.items()}
            )
        self._decoder_name, self._decoder = _decoder(self._model)
        self._blocks = self._decoder.layers
        self._calls: dict[tuple[int, int], _Calls] = {}
        self._by_layer: dict[int | None, list[str]] = {None: []}
        self.draft_names: list[str] = []
        for name in weights.names():
            placement = self.layout.place(name)
            if placement is not None and placement.layer_class is LayerClass.MTP:
                self.draft_names.append(name)
            elif placement is not None and placement.layer_class not in _NOT_STREAMED:
                self._by_layer.setdefault(placement.layer, []).append(name)

    @property
    def depth(self) -> int:
        """Number of decoder blocks."""
        return len(self._blocks)

    def block_prefix(self, index: int) -> str:
        """Live name of a block, e.g. `model.language_model.layers.3`."""
        return f"{self._decoder_name}.layers.{index}"

    @property
    def width(self) -> int:
        """H, the width of hidden states."""
        width: int = self._decoder.config.hidden_size
        return width

    def embed(self, rows: Sequence[Sequence[int]], *, tokens: int = 4096) -> Iterator[Batch]:
        """Everything in front of the first block, for rows of ids, in the batches of `group_rows`."""
        groups = group_rows([len(row) for row in rows], tokens=tokens)
        with self.loaded(self._decoder, self._decoder_name, self._by_layer[None], skip="layers."):
            for group in groups:
                with torch.no_grad():
                    batch = self._embed(group, [rows[index] for index in group])
                yield batch

    def _embed(self, indices: tuple[int, ...], rows: Sequence[Sequence[int]]) -> Batch:
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int64, device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        valid = torch.arange(longest, device=self.device)[None, :] < lengths[:, None]
        hidden, calls = self._record(input_ids=ids)
        self._calls.setdefault((ids.shape[0], ids.shape[1]), calls)
        return Batch(indices, ids, valid, hidden.to(self.dtype))

    def _record(self, **inputs: Tensor) -> tuple[Tensor, _Calls]:
        """Run the decoder with recorders for blocks: hidden states before the first, and each block's arguments."""
        calls: _Calls = {}
        decoder: Any = self._decoder
        recorders = nn.ModuleList(_Recorder(block, index, calls) for index, block in enumerate(self._blocks))
        norm, decoder.norm, decoder.layers = decoder.norm, nn.Identity(), recorders
        try:
            hidden: Tensor = decoder(**inputs, use_cache=False).last_hidden_state
        finally:
            decoder.layers, decoder.norm = self._blocks, norm
        return hidden, calls

    def _arguments(self, index: int, shape: tuple[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a block for [B, L] rows; masks and positions depend on nothing else."""
        if shape not in self._calls:
            blank = torch.zeros(*shape, self.width, dtype=self.dtype, device=self.device)
            with torch.no_grad():
                self._calls[shape] = self._record(inputs_embeds=blank)[1]
        return self._calls[shape][index]

    @contextlib.contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """Block `index` with its weights; they are freed on the way out."""
        block = self._blocks[index]
        with self.loaded(block, self.block_prefix(index), self._by_layer.get(index, ())):
            yield block

    def run(self, block: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """Hidden states [B, L, H] behind a block."""
        args, kwargs = self._arguments(index, (hidden.shape[0], hidden.shape[1]))
        with torch.no_grad():
            result = block(hidden, *args, **kwargs)
        behind: Tensor = result[0] if isinstance(result, tuple) else result
        return behind

    @contextlib.contextmanager
    def head(self) -> Iterator[Head]:
        """Final norm and lm_head with their weights."""
        head: nn.Module = self._model.get_output_embeddings()
        name = next(key for key, module in self._model.named_modules() if module is head)
        name = f"{self._decoder_name}.embed_tokens" if self.layout.tied_head else name
        norm: nn.Module = self._decoder.norm
        with (
            self.loaded(norm, f"{self._decoder_name}.norm", self._by_layer[None]),
            self.loaded(head, name, self._by_layer[None]),
            torch.no_grad(),
        ):
            yield Head(norm, head)

    @contextlib.contextmanager
    def embedding(self) -> Iterator[nn.Module]:
        """The token embedding with its weights."""
        module: nn.Module = self._decoder.embed_tokens
        with self.loaded(module, f"{self._decoder_name}.embed_tokens", self._by_layer[None]), torch.no_grad():
            yield module

    def attention_block(self) -> nn.Module:
        """A copy of a full-attention block, without weights: the body of a draft head."""
        for block in self._blocks:
            if hasattr(block, "self_attn"):
                body: nn.Module = copy.deepcopy(block)
                return body
        raise CheckpointError("the model has no full-attention block", hint="its draft head cannot be run")

    def norm_like(self) -> nn.Module:
        """A copy of the final norm, without weights."""
        norm: nn.Module = copy.deepcopy(self._decoder.norm)
        return norm

    def positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables for positions [L]."""
        rope = getattr(self._decoder.config, "rope_parameters", None) or {}
        shape = (3, 1, -1) if isinstance(rope, dict) and rope.get("mrope_section") else (1, -1)
        probe = torch.empty(1, dtype=self.dtype, device=self.device)
        tables: tuple[Tensor, Tensor] = self._decoder.rotary_emb(probe, positions.expand(*shape).contiguous())
        return tables

    @contextlib.contextmanager
    def loaded(
        self, module: nn.Module, prefix: str, names: Sequence[str], *, skip: str | None = None
    ) -> Iterator[None]:
        """Give a meta module its weights for a while: parameter `p` is live tensor `prefix.p`, found among `names`."""
        wanted = {name: p for name, p in module.named_parameters() if skip is None or not name.startswith(skip)}
        state = {f"{prefix}.{n}": torch.empty(p.shape, dtype=self.dtype, device=self.device) for n, p in wanted.items()}
        missing = self._fill(state, names)
        if missing:
            raise CheckpointError(
                f"{prefix}: the checkpoint lacks {', '.join(sorted(missing)[:5])}", hint="is this checkpoint complete?"
            )
        for name in wanted:
            _assign(module, name, nn.Parameter(state.pop(f"{prefix}.{name}"), requires_grad=False))
        try:
            yield
        finally:
            for name, parameter in wanted.items():
                _assign(module, name, parameter)

    def _fill(self, state: Mapping[str, Tensor], names: Sequence[str]) -> set[str]:
        """Copy checkpoint tensors into their places; returns the live names that stayed incomplete."""
        filled = dict.fromkeys(state, 0)
        for name in names:
            key, target = live_view(name, state, self.layout)
            if key is None or target is None:
                continue
            source = self._weights.read(name)
            if source.shape != target.shape:
                raise CheckpointError(
                    f"{name} is {list(source.shape)}, the model class wants {list(target.shape)}",
                    hint="does config.json belong to these weights?",
                )
            target.copy_(source)
            filled[key] += source.numel()
        return {key for key, count in filled.items() if count != state[key].numel()}


@dataclass(frozen=True)
class Head:
    """The end of a model: `normalize` turns the last block's hidden states into what `logits` reads."""

    norm: nn.Module
    linear: nn.Module

    def normalize(self, hidden: Tensor) -> Tensor:
        """Final norm, [..., H]."""
        normalized: Tensor = self.norm(hidden)
        return normalized

    def logits(self, normalized: Tensor) -> Tensor:
        """Logits [..., V] in float32."""
        logits: Tensor = self.linear(normalized)
        return logits.float()


_NOT_STREAMED = frozenset({LayerClass.VISION, LayerClass.AUDIO})


def _assign(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def skeleton(checkpoint: Checkpoint) -> nn.Module:
    """The class in `architectures`: parameters on the meta device, buffers real (rotary tables are computed)."""
    try:
        import transformers
    except ImportError:
        raise EnvironmentMissing(
            "transformers is not installed, and running a model needs it", hint='pip install "sparkquant[calibration]"'
        ) from None
    config = transformers.AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
    names = checkpoint.config.get("architectures") or []
    model_class = getattr(transformers, str(names[0]), None) if names else None
    if model_class is None:
        raise EnvironmentMissing(
            f"transformers {transformers.__version__} has no class {names}",
            hint="install a transformers release that knows this family",
        )
    with parameters_on_meta(), _EmptyOnMeta():
        model: nn.Module = model_class._from_config(config)
    if any(buffer.is_meta for buffer in model.buffers()):  # a class that fills an empty buffer by itself
        with parameters_on_meta():
            model = model_class._from_config(config)
    return model.eval()


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty`, which Linears make their weights with, takes no memory and is not filled with random numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters lose their data as they are registered; buffers keep theirs."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _decoder(model: nn.Module) -> tuple[str, Any]:
    """The module that owns the token embedding and the list of blocks."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "embed_tokens"):
            return name, module
    raise CheckpointError(
        f"{type(model).__name__} has no decoder with `embed_tokens` and `layers`", hint="report this model class"
    )
