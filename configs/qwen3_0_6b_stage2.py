"""Stage 2 for Qwen3-0.6B: distil the stage-1 drafter's fifteen left-to-right passes into one (DStill).

Command:  dstill train configs/qwen3_0_6b_stage2.py        (after configs/qwen3_0_6b_stage1.py)
Hardware: as stage 1. Not run yet: no result is claimed here.
          Planned (compiled, not run) with
          `dstill plan configs/qwen3_0_6b_stage2.py --slice ...`:

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage2 of Qwen/Qwen3-0.6B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 1.96 GB of 17.18 GB per device
  bytes per device: arguments 218.74 MB, outputs 84.12 MB (of them 84.11 MB in place), temporaries 1.70 GB, program
      41.48 MB
  arguments: drafter params 21.03 MB, optimiser 63.08 MB, target params 74.63 MB, embedding, head 38.90 MB, teacher
      params 21.03 MB, batch 39.94 kB
  per device and step: 50.2 TFLOP, HBM 314.82 GB, ICI 6.52 GB, DCN 0 B (2122095 ICI bytes a token)
  all-gather: 1170 x over 16 devices (ici), 4.60 GB
  all-reduce: 205 x over 16 devices (ici), 1.66 GB
  all-to-all: 17 x over 16 devices (ici), 257.56 MB
  step takes at least: compute 255 ms, hbm 384 ms, ici 32.6 ms -> bound by hbm
  at most: MFU 55% (compute alone 83%), 127,868 tokens/s, 21,311 anchors/s; 800k samples take at least 0.22 days
  host memory per device: 84.10 MB while a checkpoint is written, 19.45 MB while weights are loaded; hosts have
      48.00 GB
  features of 800k full rows, were they stored: 30.20 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-32 (1 x v5p:2x2x4, 16 devices), mesh: fsdp=16
  stage2 of Qwen/Qwen3-0.6B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 1.97 GB of 102.01 GB per device
  bytes per device: arguments 218.74 MB, outputs 84.12 MB (of them 84.11 MB in place), temporaries 1.70 GB, program
      46.34 MB
  arguments: drafter params 21.03 MB, optimiser 63.08 MB, target params 74.63 MB, embedding, head 38.90 MB, teacher
      params 21.03 MB, batch 39.94 kB
  per device and step: 50.2 TFLOP, HBM 314.32 GB, ICI 6.52 GB, DCN 0 B (2122095 ICI bytes a token)
  all-gather: 1170 x over 16 devices (ici), 4.60 GB
  all-reduce: 205 x over 16 devices (ici), 1.66 GB
  all-to-all: 17 x over 16 devices (ici), 257.56 MB
  step takes at least: compute 109 ms, hbm 114 ms, ici 16.3 ms -> bound by hbm
  at most: MFU 80% (compute alone 83%), 432,379 tokens/s, 72,063 anchors/s; 800k samples take at least 0.07 days
  host memory per device: 84.10 MB while a checkpoint is written, 19.45 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 30.20 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.
"""

import runpy
from pathlib import Path

from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.runs import stage_two_of

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("qwen3_0_6b_stage1.py")))
_OBJECTIVE = StageTwoConfig()

CONFIG = stage_two_of(_STAGE1["CONFIG"], _OBJECTIVE, "runs/qwen3_0_6b/stage2", 10_000)
TINY = stage_two_of(_STAGE1["TINY"], _OBJECTIVE, "runs/tiny/stage2_packed", 25)
SHAPE = _STAGE1["CONFIG"].new  # what `dstill plan` takes for the drafter while stage 1 has not been run
