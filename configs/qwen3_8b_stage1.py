"""Stage 1 for Qwen3-8B, with the published DFlash setting (arXiv 2602.06036): 5 layers, blocks of 16, 512 anchors.

Before:   dstill prepare --target Qwen/Qwen3-8B --prompts YOUR.jsonl --out runs/qwen3_8b/data --dtype bfloat16
Command:  dstill train configs/qwen3_8b_stage1.py
Hardware: a TPU slice; the mesh below is for 16 devices (others: docs/sharding.md). Not run yet: no
          result is claimed here. Planned (compiled, not run) with `dstill plan configs/qwen3_8b_stage1.py --slice ...`:

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-8B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 7.61 GB of 17.18 GB per device
  bytes per device: arguments 2.15 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 5.37 GB, program
      85.38 MB
  arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB, batch
      39.94 kB
  per device and step: 143 TFLOP, HBM 329.30 GB, ICI 30.89 GB, DCN 0 B (10055232 ICI bytes a token)
  all-gather: 525 x over 16 devices (ici), 18.85 GB
  all-reduce: 161 x over 16 devices (ici), 11.96 GB
  all-to-all: 2 x over 16 devices (ici), 86.51 MB
  step takes at least: compute 725 ms, hbm 402 ms, ici 154 ms -> bound by compute
  at most: MFU 82% (compute alone 82%), 67,797 tokens/s, 11,300 anchors/s; 800k samples take at least 0.42 days
  host memory per device: 1.05 GB while a checkpoint is written, 226.49 MB while weights are loaded; hosts have
      48.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v6e-16 (1 x v6e:4x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-8B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 6.62 GB of 34.36 GB per device
  bytes per device: arguments 2.15 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 4.39 GB, program
      79.97 MB
  arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB, batch
      39.94 kB
  per device and step: 143 TFLOP, HBM 376.87 GB, ICI 30.89 GB, DCN 0 B (10055232 ICI bytes a token)
  all-gather: 525 x over 16 devices (ici), 18.85 GB
  all-reduce: 161 x over 16 devices (ici), 11.96 GB
  all-to-all: 2 x over 16 devices (ici), 86.51 MB
  step takes at least: compute 156 ms, hbm 230 ms, ici 77.2 ms -> bound by hbm
  at most: MFU 55% (compute alone 82%), 213,894 tokens/s, 35,649 anchors/s; 800k samples take at least 0.13 days
  host memory per device: 1.05 GB while a checkpoint is written, 226.49 MB while weights are loaded; hosts have
      180.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-8 (1 x v5p:2x2x1, 4 devices), mesh: fsdp=4
  stage1 of Qwen/Qwen3-8B: 4 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  set for this slice: mesh.fsdp=4, batches.batch_size=4
  fits: 16.30 GB of 102.01 GB per device
  bytes per device: arguments 8.60 GB, outputs 4.20 GB (of them 4.20 GB in place), temporaries 7.67 GB, program
      28.32 MB
  arguments: drafter params 1.05 GB, optimiser 3.15 GB, target params 4.10 GB, embedding, head 622.33 MB, batch
      39.94 kB
  per device and step: 144 TFLOP, HBM 519.39 GB, ICI 19.01 GB, DCN 0 B (6188534 ICI bytes a token)
  all-gather: 393 x over 4 devices (ici), 13.97 GB
  reduce-scatter: 20 x over 4 devices (ici), 2.52 GB
  all-reduce: 73 x over 4 devices (ici), 2.46 GB
  all-to-all: 2 x over 4 devices (ici), 69.21 MB
  collective-permute: 34 x over 2 devices (ici), 136 B
  step takes at least: compute 315 ms, hbm 188 ms, ici 95.1 ms -> bound by compute
  at most: MFU 81% (compute alone 81%), 39,047 tokens/s, 6,508 anchors/s; 800k samples take at least 0.73 days
  host memory per device: 4.20 GB while a checkpoint is written, 905.97 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-32 (1 x v5p:2x2x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-8B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  fits: 7.07 GB of 102.01 GB per device
  bytes per device: arguments 2.15 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 4.88 GB, program
      39.82 MB
  arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB, batch
      39.94 kB
  per device and step: 143 TFLOP, HBM 430.78 GB, ICI 30.89 GB, DCN 0 B (10055232 ICI bytes a token)
  all-gather: 525 x over 16 devices (ici), 18.85 GB
  all-reduce: 166 x over 16 devices (ici), 11.96 GB
  all-to-all: 2 x over 16 devices (ici), 86.51 MB
  step takes at least: compute 311 ms, hbm 156 ms, ici 77.2 ms -> bound by compute
  at most: MFU 82% (compute alone 82%), 157,965 tokens/s, 26,327 anchors/s; 800k samples take at least 0.18 days
  host memory per device: 1.05 GB while a checkpoint is written, 226.49 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.

plan for v5p-512 (1 x v5p:4x8x8, 256 devices), mesh: data=16, fsdp=16
  stage1 of Qwen/Qwen3-8B: 256 rows of 3072, 512 anchors of 16; remat on, anchor chunk None
  set for this slice: mesh.data=16, batches.batch_size=256
  fits: 6.86 GB of 102.01 GB per device
  bytes per device: arguments 2.15 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 4.68 GB, program
      26.86 MB
  arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB, batch
      39.94 kB
  per device and step: 143 TFLOP, HBM 428.03 GB, ICI 28.04 GB, DCN 0 B (9127238 ICI bytes a token)
  all-gather: 525 x over 16 devices (ici), 18.85 GB
  all-reduce: 136 x over 16 devices (ici), 5.33 GB
  reduce-scatter: 41 x over 16 devices (ici), 3.77 GB
  all-to-all: 2 x over 16 devices (ici), 86.51 MB
  all-reduce: 15 x over 256 devices (ici), 301.04 kB
  collective-permute: 70 x over 2 devices (ici), 280 B
  step takes at least: compute 311 ms, hbm 155 ms, ici 46.7 ms -> bound by compute
  at most: MFU 82% (compute alone 82%), 2,527,434 tokens/s, 421,239 anchors/s; 800k samples take at least 0.01 days
  host memory per device: 1.05 GB while a checkpoint is written, 226.49 MB while weights are loaded; hosts have
      112.00 GB
  features of 800k full rows, were they stored: 120.80 TB of disk
  compiled at the lowest effort (--quick): the real program moves less in HBM, and its memory may differ by a tenth
  These are bounds from the compiled program and published peaks. Nothing was run.
"""

from dstill_jax.blocks import ViewMix
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.distill.config import StageOneConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.losses.config import LossConfig
from dstill_jax.models.drafter import Memory
from dstill_jax.runs import RunConfig
from dstill_jax.sharding.mesh import MeshConfig
from dstill_jax.training.config import OptimizerConfig, TrainConfig

CONFIG = RunConfig(
    target="Qwen/Qwen3-8B",
    data="runs/qwen3_8b/data",
    out="runs/qwen3_8b/stage1",
    objective=StageOneConfig(LossConfig(gamma=7.0), ViewMix(0.35, 0.35, 0.30), ViewMix(0.8, 0.1, 0.1)),
    optimizer=OptimizerConfig(learning_rate=6e-4, weight_decay=0.0),
    train=TrainConfig(total_steps=50_000, save_every=500),
    batches=PipelineConfig(seq_len=3072, batch_size=16, mode="pack"),
    new=DrafterShape(mask_token_id=151669, num_layers=5, block_size=16),
    anchors_per_row=512,
    mesh=MeshConfig(fsdp=16),
    memory=Memory(scan_layers=True, remat_layers=True),
)

TINY = RunConfig(
    target="tiny",
    data="runs/tiny/data",
    out="runs/tiny/stage1_packed",
    objective=CONFIG.objective,
    optimizer=OptimizerConfig(learning_rate=2.5e-3),
    train=TrainConfig(total_steps=50),
    batches=PipelineConfig(seq_len=256, batch_size=4, mode="pack"),
    new=DrafterShape(mask_token_id=2, num_layers=2, block_size=16, target_layer_ids=(0, 1, 2)),
    anchors_per_row=32,
)
