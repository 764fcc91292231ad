"""Stage 1 for Qwen3-8B, with the published DFlash setting (arXiv 2602.06036): 5 layers, blocks of 16, 512 anchors.

Before:   dstill prepare --target Qwen/Qwen3-8B --prompts YOUR.jsonl --out runs/qwen3_8b/data --dtype bfloat16
Command:  dstill train configs/qwen3_8b_stage1.py
Hardware: a TPU slice; the mesh below is for 16 devices (others: mesh.data=..., see docs/sharding.md). Not run yet: no
          result is claimed here. Planned (compiled, not run) with `dstill plan configs/qwen3_8b_stage1.py --slice ...`:

@@PLAN@@
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
    memory=Memory(scan_layers=True, remat_layers=True, anchor_chunk=64),
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
