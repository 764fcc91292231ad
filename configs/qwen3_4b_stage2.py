"""Stage 2 for Qwen3-4B: distil the stage-1 drafter's fifteen left-to-right passes into one (DStill).

Command:  dstill train configs/qwen3_4b_stage2.py        (after configs/qwen3_4b_stage1.py)
Hardware: as stage 1. Not run yet: no result is claimed here.
          Planned (compiled, not run) with
          `dstill plan configs/qwen3_4b_stage2.py --slice ...`:

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage2 of Qwen/Qwen3-4B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 4.61 GB of 17.18 GB per device
  bytes per device: arguments 1.27 GB, outputs 538.02 MB (of them 538.01 MB in place), temporaries 3.29 GB, program
      49.55 MB
  arguments: drafter params 134.48 MB, optimiser 403.43 MB, target params 503.18 MB, embedding, head 97.24 MB,
      teacher params 134.48 MB, batch 39.94 kB
  per device and step: 216 TFLOP, HBM 678.26 GB, ICI 33.37 GB, DCN 0 B (10861490 ICI bytes a token)
  all-gather: 1226 x over 16 devices (ici), 26.13 GB
  all-reduce: 221 x over 16 devices (ici), 6.59 GB
  all-to-all: 17 x over 16 devices (ici), 643.89 MB
  step takes at least: compute 1.1e+03 ms, hbm 828 ms, ici 167 ms -> bound by compute
  at most: MFU 89% (compute alone 89%), 44,757 tokens/s, 7,459 anchors/s; 800k samples take at least 0.64 days
  host memory per device: 537.91 MB while a checkpoint is written, 112.07 MB while weights are loaded; hosts have
      48.00 GB
  features of 800k full rows, were they stored: 75.50 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-32 (1 x v5p:2x2x4, 16 devices), mesh: fsdp=16
  stage2 of Qwen/Qwen3-4B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 4.62 GB of 102.01 GB per device
  bytes per device: arguments 1.27 GB, outputs 538.02 MB (of them 538.01 MB in place), temporaries 3.29 GB, program
      52.90 MB
  arguments: drafter params 134.48 MB, optimiser 403.43 MB, target params 503.18 MB, embedding, head 97.24 MB,
      teacher params 134.48 MB, batch 39.94 kB
  per device and step: 216 TFLOP, HBM 678.26 GB, ICI 33.37 GB, DCN 0 B (10861490 ICI bytes a token)
  all-gather: 1226 x over 16 devices (ici), 26.13 GB
  all-reduce: 221 x over 16 devices (ici), 6.59 GB
  all-to-all: 17 x over 16 devices (ici), 643.89 MB
  step takes at least: compute 471 ms, hbm 245 ms, ici 83.4 ms -> bound by compute
  at most: MFU 89% (compute alone 89%), 104,281 tokens/s, 17,380 anchors/s; 800k samples take at least 0.27 days
  host memory per device: 537.91 MB while a checkpoint is written, 112.07 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 75.50 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.
"""

import runpy
from pathlib import Path

from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.runs import stage_two_of

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("qwen3_4b_stage1.py")))
_OBJECTIVE = StageTwoConfig()

CONFIG = stage_two_of(_STAGE1["CONFIG"], _OBJECTIVE, "runs/qwen3_4b/stage2", 10_000)
TINY = stage_two_of(_STAGE1["TINY"], _OBJECTIVE, "runs/tiny/stage2_packed", 25)
SHAPE = _STAGE1["CONFIG"].new  # what `dstill plan` takes for the drafter while stage 1 has not been run
