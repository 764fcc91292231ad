"""Stage 1 for Llama-3.1-8B-Instruct, with the published DFlash setting (arXiv 2602.06036): 5 layers, blocks of 16, 512 anchors.

Before:   dstill prepare --target meta-llama/Llama-3.1-8B-Instruct --prompts YOUR.jsonl \\
              --out runs/llama31_8b/data --dtype bfloat16
Command:  dstill train configs/llama31_8b_stage1.py
Hardware: a TPU slice; the mesh below is for 16 devices (others: mesh.data=..., see docs/sharding.md). Not run yet: no
          result is claimed here. `dstill plan configs/llama31_8b_stage1.py --slice v5e-16` says whether it
          fits; nobody has compiled it yet.
"""

import dataclasses
import runpy
from pathlib import Path

from dstill_jax.distill.initialise import DrafterShape

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("qwen3_8b_stage1.py")))

CONFIG = dataclasses.replace(
    _STAGE1["CONFIG"],
    target="meta-llama/Llama-3.1-8B-Instruct",
    data="runs/llama31_8b/data",
    out="runs/llama31_8b/stage1",
    # <|reserved_special_token_0|>
    new=DrafterShape(mask_token_id=128002, num_layers=5, block_size=16),
)
TINY = _STAGE1["TINY"]
