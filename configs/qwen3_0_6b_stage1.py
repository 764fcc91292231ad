"""Stage 1 for Qwen3-0.6B, with the published DFlash setting (arXiv 2602.06036): 5 layers, blocks of 16, 512 anchors.

Before:   dstill prepare --target Qwen/Qwen3-0.6B --prompts YOUR.jsonl --out runs/qwen3_0_6b/data --dtype bfloat16
Command:  dstill train configs/qwen3_0_6b_stage1.py
Hardware: a TPU slice; the mesh below is for 16 devices (others: docs/sharding.md). Not run yet: no
          result is claimed here. Planned (compiled, not run) with
          `dstill plan configs/qwen3_0_6b_stage1.py --slice ...`:

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-0.6B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 1.98 GB of 17.18 GB per device
  bytes per device: arguments 197.72 MB, outputs 84.12 MB (of them 84.11 MB in place), temporaries 1.75 GB, program
      30.20 MB
  arguments: drafter params 21.03 MB, optimiser 63.08 MB, target params 74.63 MB, embedding, head 38.90 MB, batch
      39.94 kB
  per device and step: 19.6 TFLOP, HBM 152.75 GB, ICI 3.32 GB, DCN 0 B (1081095 ICI bytes a token)
  all-reduce: 145 x over 16 devices (ici), 1.66 GB
  all-gather: 469 x over 16 devices (ici), 1.64 GB
  all-to-all: 2 x over 16 devices (ici), 21.63 MB
  step takes at least: compute 99.6 ms, hbm 187 ms, ici 16.6 ms -> bound by hbm
  at most: MFU 39% (compute alone 73%), 263,545 tokens/s, 43,924 anchors/s; 800k samples take at least 0.11 days
  host memory per device: 84.10 MB while a checkpoint is written, 19.45 MB while weights are loaded; hosts have
      48.00 GB
  features of 800k full rows, were they stored: 30.20 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-32 (1 x v5p:2x2x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-0.6B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 1.99 GB of 102.01 GB per device
  bytes per device: arguments 197.72 MB, outputs 84.12 MB (of them 84.11 MB in place), temporaries 1.75 GB, program
      35.69 MB
  arguments: drafter params 21.03 MB, optimiser 63.08 MB, target params 74.63 MB, embedding, head 38.90 MB, batch
      39.94 kB
  per device and step: 19.6 TFLOP, HBM 152.24 GB, ICI 3.32 GB, DCN 0 B (1081095 ICI bytes a token)
  all-reduce: 145 x over 16 devices (ici), 1.66 GB
  all-gather: 469 x over 16 devices (ici), 1.64 GB
  all-to-all: 2 x over 16 devices (ici), 21.63 MB
  step takes at least: compute 42.7 ms, hbm 55.1 ms, ici 8.3 ms -> bound by hbm
  at most: MFU 56% (compute alone 73%), 892,687 tokens/s, 148,781 anchors/s; 800k samples take at least 0.03 days
  host memory per device: 84.10 MB while a checkpoint is written, 19.45 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 30.20 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.
"""

import dataclasses
import runpy
from pathlib import Path

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("qwen3_8b_stage1.py")))

CONFIG = dataclasses.replace(
    _STAGE1["CONFIG"],
    target="Qwen/Qwen3-0.6B",
    data="runs/qwen3_0_6b/data",
    out="runs/qwen3_0_6b/stage1",
)
TINY = _STAGE1["TINY"]
