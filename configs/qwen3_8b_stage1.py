"""Stage 1 for Qwen3-8B, with the published DFlash setting (arXiv 2602.06036): 5 layers, blocks of 16, 512 anchors.

Before:   dstill prepare --target Qwen/Qwen3-8B --prompts YOUR.jsonl --out runs/qwen3_8b/data --dtype bfloat16
Command:  dstill train configs/qwen3_8b_stage1.py
Hardware: a TPU slice; the mesh below is for 16 devices (others: mesh.data=..., see docs/sharding.md). Not run yet: no
          result is claimed here. Planned (compiled, not run) with `dstill plan configs/qwen3_8b_stage1.py --slice ...`:

plan for v5e-16 (1 x v5e:4x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-8B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk 64
  fits: 7.41 GB of 17.18 GB per device
  bytes per device: arguments 2.15 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 5.15 GB, program 111.20
    MB
    arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB, batch
      39.94 kB
  per device and step: 148.3 TFLOP, HBM 635.35 GB, ICI 33.33 GB, DCN 0 B (10849888 ICI bytes a token)
    all-gather            490 x over   16 devices (ici): 21.28 GB
    all-reduce            172 x over   16 devices (ici): 11.96 GB
    all-to-all              2 x over   16 devices (ici): 86.51 MB
  step takes at least: compute 753 ms, hbm 776 ms, ici 167 ms -> bound by hbm
  at most: MFU 77% (compute alone 79%), 63,360 tokens/s, 10,560 anchors/s; 800k samples take at least 0.45 days

plan for v5p-32 (1 x v5p:2x2x4, 16 devices), mesh: fsdp=16
  stage1 of Qwen/Qwen3-8B: 16 rows of 3072, 512 anchors of 16; remat on, anchor chunk 64
  fits: 6.58 GB of 102.01 GB per device
  bytes per device: arguments 2.15 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 4.32 GB, program 113.01
    MB
    arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB, batch
      39.94 kB
  per device and step: 148.3 TFLOP, HBM 625.19 GB, ICI 30.81 GB, DCN 0 B (10030688 ICI bytes a token)
    all-gather            410 x over   16 devices (ici): 18.77 GB
    all-reduce            172 x over   16 devices (ici): 11.96 GB
    all-to-all              2 x over   16 devices (ici): 86.51 MB
  step takes at least: compute 323 ms, hbm 226 ms, ici 77 ms -> bound by compute
  at most: MFU 79% (compute alone 79%), 152,134 tokens/s, 25,356 anchors/s; 800k samples take at least 0.19 days

plan for v5p-512 (1 x v5p:4x8x8, 256 devices), mesh: data=16, fsdp=16
  stage1 of Qwen/Qwen3-8B: 256 rows of 3072, 512 anchors of 16; remat on, anchor chunk 64
  set for this slice: mesh.data=16, batches.batch_size=256
  fits: 7.19 GB of 102.01 GB per device
  bytes per device: arguments 2.15 GB, outputs 1.05 GB (of them 1.05 GB in place), temporaries 4.94 GB, program 92.31
    MB
    arguments: drafter params 262.35 MB, optimiser 787.04 MB, target params 1.02 GB, embedding, head 155.58 MB, batch
      39.94 kB
  per device and step: 148.3 TFLOP, HBM 621.25 GB, ICI 27.67 GB, DCN 0 B (9006694 ICI bytes a token)
    all-gather            410 x over   16 devices (ici): 18.77 GB
    all-reduce            146 x over   16 devices (ici): 5.04 GB
    reduce-scatter         41 x over   16 devices (ici): 3.77 GB
    all-to-all              2 x over   16 devices (ici): 86.51 MB
    all-reduce             10 x over  256 devices (ici): 318.89 kB
    collective-permute     25 x over    2 devices (ici): 100 B
  step takes at least: compute 323 ms, hbm 225 ms, ici 46 ms -> bound by compute
  at most: MFU 79% (compute alone 79%), 2,434,150 tokens/s, 405,692 anchors/s; 800k samples take at least 0.01 days
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
