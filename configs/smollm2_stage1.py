"""Stage 1 on SmolLM2-135M-Instruct: complete partially revealed blocks of 8.

Before:   dstill fetch smollm2 gsm8k
          dstill prepare --target smollm2 --prompts gsm8k --out runs/smollm2/data --max-prompt-tokens 128 \\
              --max-new-tokens 128 --workers 2 --taps 1 8 14 20 27
Command:  dstill train configs/smollm2_stage1.py
Hardware: any; on two CPU cores a step takes about a third of a second.
Expected: see the table of `dstill demo` in the README: the same drafter and loss for a few hundred steps, at another
          learning rate and smaller batches. This longer one has not been run to its end yet.

GSM8K here is its test file: `dstill prepare --prompts gsm8k` leaves out the held-out rows, `dstill eval --prompts gsm8k`
takes no others.

The same on the tiny target, in minutes (`dstill train configs/smollm2_stage1.py --tiny`), needs
  dstill prepare --target tiny --prompts "$(dstill fetch tiny)/prompts_train.jsonl" --limit 256 --out runs/tiny/data \\
      --max-prompt-tokens 80 --max-new-tokens 96 --temperature 0.3 --taps 0 1 2
"""

from dstill_jax.blocks import ViewMix
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.distill.config import StageOneConfig
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.losses.config import LossConfig
from dstill_jax.runs import RunConfig
from dstill_jax.training.config import OptimizerConfig, TrainConfig

CONFIG = RunConfig(
    target="smollm2",
    data="runs/smollm2/data",
    out="runs/smollm2/stage1",
    objective=StageOneConfig(LossConfig(gamma=4.0), ViewMix(0.35, 0.35, 0.30), ViewMix(0.8, 0.1, 0.1)),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    train=TrainConfig(total_steps=10_000),
    batches=PipelineConfig(seq_len=256, batch_size=4),
    new=DrafterShape(mask_token_id=16, num_layers=2, block_size=8, init_from_layers=(28, 29)),
    anchors_per_row=16,
    vocabulary=4096,
    compute_dtype="float32",
)

TINY = RunConfig(
    target="tiny",
    data="runs/tiny/data",
    out="runs/tiny/stage1",
    objective=CONFIG.objective,
    optimizer=OptimizerConfig(learning_rate=2.5e-3, ema_decay=0.98),
    train=TrainConfig(total_steps=200),
    batches=PipelineConfig(seq_len=176, batch_size=4),
    new=DrafterShape(mask_token_id=2, num_layers=2, block_size=8, target_layer_ids=(0, 1, 2)),
    anchors_per_row=32,
    compute_dtype="float32",
)
