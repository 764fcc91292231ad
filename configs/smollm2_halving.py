"""Stage 2 on SmolLM2-135M-Instruct in two rounds: a teacher of 4 passes into a student of 2, then that one into 1.

Command:  dstill train configs/smollm2_halving.py        (after configs/smollm2_stage1.py)
Hardware: any; on two CPU cores a step takes up to twice a stage-1 step.
Expected: not run yet: no result is claimed here. Compare with configs/smollm2_stage2.py at the same total of steps.

Two runs, in runs/smollm2/halving/round1 and round2; stopped and given again, the command goes on where it was. Within a
round the curriculum goes from partly to fully masked as always. A second round of full trajectories instead, its
teacher the first student: refreshed_runs(..., (1, 1)).
"""

import runpy
from pathlib import Path

from dstill_jax.distill.config import CurriculumConfig, StageTwoConfig
from dstill_jax.runs import refreshed_runs, stage_two_of

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("smollm2_stage1.py")))
_OBJECTIVE = StageTwoConfig(curriculum=CurriculumConfig(fraction=0.15), passes=4)

CONFIG = refreshed_runs(stage_two_of(_STAGE1["CONFIG"], _OBJECTIVE, "runs/smollm2/halving", 2000), (2, 1))
TINY = refreshed_runs(stage_two_of(_STAGE1["TINY"], _OBJECTIVE, "runs/tiny/halving", 50), (2, 1))
