"""Stage 2 for Qwen3-8B: distil the stage-1 drafter's fifteen left-to-right passes into one (DStill).

Command:  dstill train configs/qwen3_8b_stage2.py        (after configs/qwen3_8b_stage1.py)
Hardware: as stage 1. Not run yet: no result is claimed here.
          Planned (compiled, not run) with
          `dstill plan configs/qwen3_8b_stage2.py --slice ...`:

plan for v5p-128 (1 x v5p:4x4x4, 64 devices), mesh: data=4, fsdp=16
  stage2 of Qwen/Qwen3-8B: 64 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  set for this slice: mesh.data=4, batches.batch_size=64
  fits: 7.01 GB of 102.01 GB per device
  bytes per device: arguments 2.41 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 4.55 GB, program
      38.19 MB
  arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB,
      teacher params 262.35 MB, batch 39.94 kB
  per device and step: 380 TFLOP, HBM 836.27 GB, ICI 59.09 GB, DCN 0 B (19235757 ICI bytes a token)
  all-gather: 1226 x over 16 devices (ici), 49.05 GB
  all-reduce: 185 x over 16 devices (ici), 4.83 GB
  reduce-scatter: 41 x over 16 devices (ici), 3.77 GB
  all-to-all: 17 x over 16 devices (ici), 1.03 GB
  all-reduce: 11 x over 4 devices (ici), 408.94 MB
  all-reduce: 15 x over 64 devices (ici), 297.52 kB
  step takes at least: compute 829 ms, hbm 302 ms, ici 98.5 ms -> bound by compute
  at most: MFU 90% (compute alone 90%), 237,215 tokens/s, 39,536 anchors/s; 800k samples take at least 0.12 days
  host memory per device: 1.05 GB while a checkpoint is written, 226.49 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage2 of Qwen/Qwen3-8B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 7.02 GB of 17.18 GB per device
  bytes per device: arguments 2.41 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 4.55 GB, program
      47.25 MB
  arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB,
      teacher params 262.35 MB, batch 39.94 kB
  per device and step: 380 TFLOP, HBM 839.02 GB, ICI 62.05 GB, DCN 0 B (20197032 ICI bytes a token)
  all-gather: 1226 x over 16 devices (ici), 49.05 GB
  all-reduce: 226 x over 16 devices (ici), 11.96 GB
  all-to-all: 17 x over 16 devices (ici), 1.03 GB
  step takes at least: compute 1.93e+03 ms, hbm 1.02e+03 ms, ici 310 ms -> bound by compute
  at most: MFU 90% (compute alone 90%), 25,453 tokens/s, 4,242 anchors/s; 800k samples take at least 1.12 days
  host memory per device: 1.05 GB while a checkpoint is written, 226.49 MB while weights are loaded; hosts have
      48.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.
"""

import runpy
from pathlib import Path

from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.runs import stage_two_of

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("qwen3_8b_stage1.py")))
_OBJECTIVE = StageTwoConfig()

CONFIG = stage_two_of(_STAGE1["CONFIG"], _OBJECTIVE, "runs/qwen3_8b/stage2", 10_000)
TINY = stage_two_of(_STAGE1["TINY"], _OBJECTIVE, "runs/tiny/stage2_packed", 25)
SHAPE = _STAGE1["CONFIG"].new  # what `dstill plan` takes for the drafter while stage 1 has not been run
