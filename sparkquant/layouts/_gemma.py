"""Per-layer inputs of recent Gemma models: a second embedding whose rows are projected into every layer."""

from __future__ import annotations

from sparkquant.layers import LayerClass as C
from sparkquant.layers import TensorRule
from sparkquant.layouts import _decoder as d

NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm(?:_2)?",
    "post_feedforward_layernorm(?:_[12])?", "post_per_layer_input_norm",
)  # fmt: skip

IGNORE = (
    r"re:.*per_layer_(?:input_gate|projection|model_projection)$",
    r"re:.*(?:embed_tokens|embed_tokens_per_layer|per_layer_embed_tokens)$",
)


def per_layer_input(path: str, at: str) -> tuple[TensorRule, ...]:
    """Table, projections and norms; `path` leads to the text model, `at` to a layer."""
    return (
        d.kept(rf"{path}embed_tokens_per_layer\.weight", C.EMBED),
        d.kept(rf"{path}per_layer_model_projection\.weight", C.ADAPTER),
        d.kept(rf"{path}per_layer_projection_norm\.weight", C.NORM),
        d.kept(rf"{at}\.per_layer_(?:input_gate|projection)\.weight", C.ADAPTER),
        *d.norms(at, *NORMS),
    )
