"""Quantize the checkpoint in `hybrid-5m`, verify it, and let the original and the result answer the same question.

python examples/demo.py [--recipe qwen-hybrid-w4a16] [--out demo-out]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent / "hybrid-5m"

QUESTION = """\
```python
class Harbour:
    def __init__(self, name: str, depth: float=4.5): ...
    def moor(self, vessel: str, days: int=1): ...
    def release(self, vessel: str): ...
```
What is the signature of `moor`?"""


def main() -> None:
    """Plan, quantize, verify, answer."""
    options = argparse.ArgumentParser(description="Quantize a small hybrid, verify it, compare one answer.")
    options.add_argument("--recipe", default="qwen-hybrid-w4a16")
    options.add_argument("--out", type=Path, default=Path("demo-out"))
    chosen = options.parse_args()
    result = chosen.out / f"hybrid-5m-{Path(chosen.recipe).stem}"
    if result.exists():
        shutil.rmtree(result)
    sparkquant("plan", SOURCE, "-r", chosen.recipe)
    sparkquant("quantize", SOURCE, "-r", chosen.recipe, "--rows", "16", "-o", result)
    sparkquant("verify", result, "--source", SOURCE)

    print(f"\n{QUESTION}\n")
    for name, folder in (("original", SOURCE), ("quantized", result)):
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of the model loader
            text, quantized = answer(folder)
        print(f"{name:<10} {text}\n{'':<10} ({quantized} quantized modules ran)", flush=True)
        if (folder is result) != (quantized > 0):
            sys.exit(f"{folder} did not run as it is stored")


def sparkquant(*arguments: object) -> None:
    """One command, shown as it would be typed."""
    here = Path.cwd()
    words = [str(a.relative_to(here) if isinstance(a, Path) and a.is_relative_to(here) else a) for a in arguments]
    print(f"\n$ sparkquant {' '.join(words)}", flush=True)
    command = [sys.executable, "-c", "from sparkquant.cli import main; main()", *words]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def answer(folder: Path) -> tuple[str, int]:
    """The greedy answer of a checkpoint, and how many of its modules hold quantized weights."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.bfloat16).eval()
    quantized = sum(hasattr(module, "weight_scale") for module in model.modules())
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        made = model.generate(**tokens, max_new_tokens=64, do_sample=False)
    text: str = tokenizer.decode(made[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip(), quantized


if __name__ == "__main__":
    main()
