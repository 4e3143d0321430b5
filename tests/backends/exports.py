"""Checkpoints as the packages themselves write them: each by its own exporter, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KEPT = (
    r"re:.*in_proj_[ab]$", r"re:.*conv1d$", r"re:.*visual.*", r"re:.*mtp.*", r"re:.*lm_head$", r"re:.*embed_tokens$",
    r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$",
)  # fmt: skip

LLMCOMPRESSOR = """
import sys, json, torch, transformers
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
source, out, scheme, kept = sys.argv[1:]
names = json.load(open(source + "/config.json"))["architectures"]
model = getattr(transformers, names[0]).from_pretrained(source, dtype="auto")
oneshot(model=model, recipe=[QuantizationModifier(targets="Linear", scheme=scheme, ignore=json.loads(kept))])
model.save_pretrained(out)
transformers.AutoTokenizer.from_pretrained(source).save_pretrained(out)
"""

AUTOROUND = """
import sys, json, torch, transformers
from auto_round import AutoRound
if __name__ == "__main__":
    source, out, form = sys.argv[1:]
    names = json.load(open(source + "/config.json"))["architectures"]
    model = getattr(transformers, names[0]).from_pretrained(source, dtype=torch.bfloat16)
    keep = dict(bits=16, act_bits=16, data_type="float", act_data_type="float")
    names = [n for n, m in model.named_modules() if n.endswith(("in_proj_a", "in_proj_b", "lm_head"))]
    rows = [{"input_ids": torch.arange(i, i + 64)[None] % 250} for i in range(8)]
    class Processor:
        def save_pretrained(self, *args, **more): pass
    tuner = AutoRound(model, tokenizer=transformers.AutoTokenizer.from_pretrained(source), processor=Processor(),
                      scheme="W4A16",
                      layer_config={n: keep for n in names} | {"mtp": keep}, dataset=rows, nsamples=8, seqlen=64,
                      iters=1, batch_size=4, device_map="cpu", enable_torch_compile=False)
    print(json.dumps(str(tuner.quantize_and_save(out, format=form)[1])))
"""

MODELOPT = """
import sys, json, torch, transformers
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
source, out = sys.argv[1:]
names = json.load(open(source + "/config.json"))["architectures"]
model = getattr(transformers, names[0]).from_pretrained(source, dtype="auto")
nvfp4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
entries = [{"quantizer_name": "*", "enable": False}]
entries += [{"quantizer_name": f"{n}.weight_quantizer", "cfg": nvfp4} for n, m in model.named_modules()
            if isinstance(m, torch.nn.Linear) and ".mlp." in n and "visual" not in n]
model = mtq.quantize(model, {"quant_cfg": entries, "algorithm": "max"}, None)
export_hf_checkpoint(model, export_dir=out)
transformers.AutoTokenizer.from_pretrained(source).save_pretrained(out)
"""


def _run(code: str, *arguments: object) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def llmcompressor_export(source: Path, out: Path, scheme: str = "W4A16") -> Path:
    """Round to nearest with a full ignore list, saved by `save_pretrained`."""
    _run(LLMCOMPRESSOR, source, out, scheme, json.dumps(KEPT))
    return out


def autoround_export(source: Path, out: Path, form: str = "auto_round") -> Path:
    """One step of tuning, saved as `auto_round` or `llm_compressor`."""
    return Path(json.loads(_run(AUTOROUND, source, out, form).strip().splitlines()[-1]))


def modelopt_export(source: Path, out: Path) -> Path:
    """NVFP4 on the MLP, saved by `export_hf_checkpoint` without a draft head."""
    _run(MODELOPT, source, out)
    return out
