"""Stage 2 on SmolLM2-135M-Instruct: distil seven left-to-right passes of the stage-1 drafter into one.

Command:  dstill train configs/smollm2_stage2.py        (after configs/smollm2_stage1.py)
Hardware: any; on two CPU cores a step takes about twice a stage-1 step.
Expected: see the table of `dstill demo` in the README (arm A4 against A1c; weighed by distance there, so that the teacher is
the only difference). This longer one has not been run yet.

Slot 1 keeps the text's own token; later slots follow half that, half the teacher's distribution when it committed them.
Other choices are overrides: docs/distillation.md lists them.
"""

import runpy
from pathlib import Path

from dstill_jax.distill.config import CurriculumConfig, StageTwoConfig
from dstill_jax.runs import stage_two_of

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("smollm2_stage1.py")))
_OBJECTIVE = StageTwoConfig(curriculum=CurriculumConfig(fraction=0.15))

CONFIG = stage_two_of(_STAGE1["CONFIG"], _OBJECTIVE, "runs/smollm2/stage2", 4000)
TINY = stage_two_of(_STAGE1["TINY"], _OBJECTIVE, "runs/tiny/stage2", 100)
