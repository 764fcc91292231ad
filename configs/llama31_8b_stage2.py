"""Stage 2 for Llama-3.1-8B-Instruct: distil the stage-1 drafter's fifteen left-to-right passes into one (DStill).

Command:  dstill train configs/llama31_8b_stage2.py        (after configs/llama31_8b_stage1.py)
Hardware: as stage 1. Not run yet: no result is claimed here.
          Planned (compiled, not run) with
          `dstill plan configs/llama31_8b_stage2.py --slice ...`:

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage2 of meta-llama/Llama-3.1-8B-Instruct: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 7.54 GB of 17.18 GB per device
  bytes per device: arguments 2.54 GB, outputs 1.18 GB (of them 1.18 GB in place), temporaries 4.95 GB, program
      45.02 MB
  arguments: drafter params 293.80 MB, optimiser 881.41 MB, target params 1.00 GB, embedding, head 131.33 MB,
      teacher params 293.80 MB, batch 39.94 kB
  per device and step: 403 TFLOP, HBM 824.32 GB, ICI 67.06 GB, DCN 0 B (21830404 ICI bytes a token)
  all-gather: 1198 x over 16 devices (ici), 53.13 GB
  all-reduce: 215 x over 16 devices (ici), 12.91 GB
  all-to-all: 17 x over 16 devices (ici), 1.03 GB
  step takes at least: compute 2.05e+03 ms, hbm 1.01e+03 ms, ici 335 ms -> bound by compute
  at most: MFU 92% (compute alone 92%), 24,002 tokens/s, 4,000 anchors/s; 800k samples take at least 1.19 days
  host memory per device: 1.18 GB while a checkpoint is written, 234.88 MB while weights are loaded; hosts have
      48.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-32 (1 x v5p:2x2x4, 16 devices), mesh: fsdp=16
  stage2 of meta-llama/Llama-3.1-8B-Instruct: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 7.78 GB of 102.01 GB per device
  bytes per device: arguments 2.54 GB, outputs 1.18 GB (of them 1.18 GB in place), temporaries 5.19 GB, program
      50.69 MB
  arguments: drafter params 293.80 MB, optimiser 881.41 MB, target params 1.00 GB, embedding, head 131.33 MB,
      teacher params 293.80 MB, batch 39.94 kB
  per device and step: 403 TFLOP, HBM 824.32 GB, ICI 67.06 GB, DCN 0 B (21830404 ICI bytes a token)
  all-gather: 1198 x over 16 devices (ici), 53.13 GB
  all-reduce: 215 x over 16 devices (ici), 12.91 GB
  all-to-all: 17 x over 16 devices (ici), 1.03 GB
  step takes at least: compute 879 ms, hbm 298 ms, ici 168 ms -> bound by compute
  at most: MFU 92% (compute alone 92%), 55,923 tokens/s, 9,321 anchors/s; 800k samples take at least 0.51 days
  host memory per device: 1.18 GB while a checkpoint is written, 234.88 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.
"""

import runpy
from pathlib import Path

from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.runs import stage_two_of

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("llama31_8b_stage1.py")))
_OBJECTIVE = StageTwoConfig()

CONFIG = stage_two_of(_STAGE1["CONFIG"], _OBJECTIVE, "runs/llama31_8b/stage2", 10_000)
TINY = stage_two_of(_STAGE1["TINY"], _OBJECTIVE, "runs/tiny/stage2_packed", 25)
SHAPE = _STAGE1["CONFIG"].new  # what `dstill plan` takes for the drafter while stage 1 has not been run
