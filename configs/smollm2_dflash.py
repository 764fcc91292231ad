"""The control of everything: one-pass DFlash on SmolLM2-135M-Instruct, fully masked blocks, plain cross-entropy.

Command:  dstill train configs/smollm2_dflash.py        (data as in configs/smollm2_stage1.py)
Hardware: any; on two CPU cores a step takes about a third of a second.
Expected: see the table of `dstill demo` in the README (arm A1): the same drafter and loss for a few hundred steps, at
          another learning rate and smaller batches.
"""

import dataclasses
import runpy
from pathlib import Path

from dstill_jax.distill.config import dflash_baseline
from dstill_jax.losses.config import LossConfig

_STAGE1 = runpy.run_path(str(Path(__file__).with_name("smollm2_stage1.py")))


def _plain(config, out: str):
    return dataclasses.replace(config, objective=dflash_baseline(LossConfig(gamma=4.0)), out=out)


CONFIG = _plain(_STAGE1["CONFIG"], "runs/smollm2/dflash")
TINY = _plain(_STAGE1["TINY"], "runs/tiny/dflash")
