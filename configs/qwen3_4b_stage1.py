"""Stage 1 for Qwen3-4B, with the published DFlash setting (arXiv 2602.06036): 5 layers, blocks of 16, 512 anchors.

Before:   dstill prepare --target Qwen/Qwen3-4B --prompts YOUR.jsonl --out runs/qwen3_4b/data --dtype bfloat16
Command:  dstill train configs/qwen3_4b_stage1.py
Hardware: a TPU slice; the mesh below is for 16 devices (others: mesh.data=..., see docs/sharding.md). Not run yet: no
          result is claimed here. `dstill plan configs/qwen3_4b_stage1.py --slice v5e-16` says whether it
          fits; nobody has compiled it yet.
"""

import dataclasses
import runpy
from pathlib import Path

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("qwen3_8b_stage1.py")))

CONFIG = dataclasses.replace(
    _STAGE1["CONFIG"],
    target="Qwen/Qwen3-4B",
    data="runs/qwen3_4b/data",
    out="runs/qwen3_4b/stage1",
)
TINY = _STAGE1["TINY"]
