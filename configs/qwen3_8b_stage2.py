"""Stage 2 for Qwen3-8B: distil the stage-1 drafter's fifteen left-to-right passes into one (DStill).

Command:  dstill train configs/qwen3_8b_stage2.py        (after configs/qwen3_8b_stage1.py)
Hardware: as stage 1. Not run yet: no result is claimed here.
          `dstill plan configs/qwen3_8b_stage2.py --slice v5e-16` says whether it fits; nobody has compiled it yet.
"""

import runpy
from pathlib import Path

from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.losses.config import LossConfig, TermWeights
from dstill_jax.runs import stage_two_of

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("qwen3_8b_stage1.py")))
_LOSS = LossConfig(first=TermWeights(data_ce=1.0), rest=TermWeights(teacher_kl=1.0), gamma=7.0)
_OBJECTIVE = StageTwoConfig(_LOSS)

CONFIG = stage_two_of(_STAGE1["CONFIG"], _OBJECTIVE, "runs/qwen3_8b/stage2", 10_000)
TINY = stage_two_of(_STAGE1["TINY"], _OBJECTIVE, "runs/tiny/stage2_packed", 25)
SHAPE = _STAGE1["CONFIG"].new  # what `dstill plan` takes for the drafter while stage 1 has not been run
