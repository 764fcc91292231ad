"""Stage 1 for Qwen3-4B, with the published DFlash setting (arXiv 2602.06036): 5 layers, blocks of 16, 512 anchors.

Before:   dstill prepare --target Qwen/Qwen3-4B --prompts YOUR.jsonl --out runs/qwen3_4b/data --dtype bfloat16
Command:  dstill train configs/qwen3_4b_stage1.py
Hardware: a TPU slice; the mesh below is for 16 devices (others: docs/sharding.md). Not run yet: no
          result is claimed here. Planned (compiled, not run) with
          `dstill plan configs/qwen3_4b_stage1.py --slice ...`:

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-4B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 4.54 GB of 17.18 GB per device
  bytes per device: arguments 1.14 GB, outputs 538.02 MB (of them 538.01 MB in place), temporaries 3.36 GB, program
      37.88 MB
  arguments: drafter params 134.48 MB, optimiser 403.43 MB, target params 503.18 MB, embedding, head 97.24 MB, batch
      39.94 kB
  per device and step: 82.6 TFLOP, HBM 357.78 GB, ICI 16.69 GB, DCN 0 B (5433290 ICI bytes a token)
  all-gather: 525 x over 16 devices (ici), 10.05 GB
  all-reduce: 161 x over 16 devices (ici), 6.59 GB
  all-to-all: 2 x over 16 devices (ici), 54.07 MB
  step takes at least: compute 419 ms, hbm 437 ms, ici 83.5 ms -> bound by hbm
  at most: MFU 77% (compute alone 80%), 112,514 tokens/s, 18,752 anchors/s; 800k samples take at least 0.25 days
  host memory per device: 537.91 MB while a checkpoint is written, 112.07 MB while weights are loaded; hosts have
      48.00 GB
  features of 800k full rows, were they stored: 75.50 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-32 (1 x v5p:2x2x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-4B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 4.55 GB of 102.01 GB per device
  bytes per device: arguments 1.14 GB, outputs 538.02 MB (of them 538.01 MB in place), temporaries 3.37 GB, program
      42.08 MB
  arguments: drafter params 134.48 MB, optimiser 403.43 MB, target params 503.18 MB, embedding, head 97.24 MB, batch
      39.94 kB
  per device and step: 82.6 TFLOP, HBM 357.78 GB, ICI 16.69 GB, DCN 0 B (5433290 ICI bytes a token)
  all-gather: 525 x over 16 devices (ici), 10.05 GB
  all-reduce: 161 x over 16 devices (ici), 6.59 GB
  all-to-all: 2 x over 16 devices (ici), 54.07 MB
  step takes at least: compute 180 ms, hbm 129 ms, ici 41.7 ms -> bound by compute
  at most: MFU 80% (compute alone 80%), 273,091 tokens/s, 45,515 anchors/s; 800k samples take at least 0.10 days
  host memory per device: 537.91 MB while a checkpoint is written, 112.07 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 75.50 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.
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
