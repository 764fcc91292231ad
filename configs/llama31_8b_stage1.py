"""Stage 1 for Llama-3.1-8B-Instruct, with the published DFlash setting (arXiv 2602.06036): 5 layers, blocks of 16, 512 anchors.

Before:   dstill prepare --target meta-llama/Llama-3.1-8B-Instruct --prompts YOUR.jsonl \\
              --out runs/llama31_8b/data --dtype bfloat16
Command:  dstill train configs/llama31_8b_stage1.py
Hardware: a TPU slice; the mesh below is for 16 devices (others: docs/sharding.md). Not run yet: no
          result is claimed here. Planned (compiled, not run) with
          `dstill plan configs/llama31_8b_stage1.py --slice ...`:

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage1 of meta-llama/Llama-3.1-8B-Instruct: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 7.30 GB of 17.18 GB per device
  bytes per device: arguments 2.25 GB, outputs 1.18 GB (of them 1.18 GB in place), temporaries 5.02 GB, program
      33.68 MB
  arguments: drafter params 293.80 MB, optimiser 881.41 MB, target params 1.00 GB, embedding, head 131.33 MB, batch
      39.94 kB
  per device and step: 145 TFLOP, HBM 404.60 GB, ICI 32.37 GB, DCN 0 B (10536512 ICI bytes a token)
  all-gather: 497 x over 16 devices (ici), 19.38 GB
  all-reduce: 166 x over 16 devices (ici), 12.90 GB
  all-to-all: 2 x over 16 devices (ici), 86.51 MB
  step takes at least: compute 738 ms, hbm 494 ms, ici 162 ms -> bound by compute
  at most: MFU 83% (compute alone 83%), 66,627 tokens/s, 11,105 anchors/s; 800k samples take at least 0.43 days
  host memory per device: 1.18 GB while a checkpoint is written, 234.88 MB while weights are loaded; hosts have
      48.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-32 (1 x v5p:2x2x4, 16 devices), mesh: fsdp=16
  stage1 of meta-llama/Llama-3.1-8B-Instruct: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 7.54 GB of 102.01 GB per device
  bytes per device: arguments 2.25 GB, outputs 1.18 GB (of them 1.18 GB in place), temporaries 5.25 GB, program
      39.81 MB
  arguments: drafter params 293.80 MB, optimiser 881.41 MB, target params 1.00 GB, embedding, head 131.33 MB, batch
      39.94 kB
  per device and step: 145 TFLOP, HBM 404.60 GB, ICI 32.37 GB, DCN 0 B (10536512 ICI bytes a token)
  all-gather: 497 x over 16 devices (ici), 19.38 GB
  all-reduce: 166 x over 16 devices (ici), 12.90 GB
  all-to-all: 2 x over 16 devices (ici), 86.51 MB
  step takes at least: compute 317 ms, hbm 146 ms, ici 80.9 ms -> bound by compute
  at most: MFU 83% (compute alone 83%), 155,238 tokens/s, 25,873 anchors/s; 800k samples take at least 0.18 days
  host memory per device: 1.18 GB while a checkpoint is written, 234.88 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.
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
