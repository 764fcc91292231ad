"""The arms: what each trains, from where, for how long. Pure declarations; `run.py` trains and measures them.

Letters as in docs/concepts.md. An arm is named; a cell is an arm at one block size and seed. Arms with a `start` go on
from another arm's drafter of the same cell, so they share everything up to there.
"""

from dataclasses import dataclass, replace

from dstill_jax.blocks import ViewMix
from dstill_jax.data.pipeline import PipelineConfig
from dstill_jax.distill.config import CurriculumConfig, StageOneConfig, StageTwoConfig, dflash_baseline
from dstill_jax.distill.initialise import DrafterShape
from dstill_jax.losses.config import BlockTerms, LossConfig, TermWeights
from dstill_jax.runs import RunConfig
from dstill_jax.training.config import OptimizerConfig, TrainConfig

PROMPT_TOKENS, NEW_TOKENS = 80, 96
TAPS = (0, 1, 2)  # all layers of the tiny target but the last
GAMMA = {8: 4.0, 16: 7.0}
STEPS = {"small": (8000, 2000, 2000), "large": (16000, 4000, 4000)}
"""By size of the data: steps of plain training from scratch, of partly revealed views, and of the second stage."""

STEP_COST = {8: 1.6, 16: 2.7}
"""Time of a stage-2 step over that of a plain one, by which equal compute is reckoned: 103 / 65 and 269 / 99 ms, one
thread (`costs.py`)."""
DEEP = 4  # layers of the deeper drafters: as many as the target has


@dataclass(frozen=True)
class Arm:
    """One line of the table."""

    about: str
    objective: StageOneConfig | StageTwoConfig
    steps: int
    start: str | None = None  # arm whose drafter it goes on from; None: a new one
    num_layers: int = 2
    learning_rate: float = 1.2e-3  # of arms that go on; a new drafter begins with 2.5e-3
    optimizer: str = "adamw"
    layout: tuple[int, int] = (4, 32)  # rows of a batch, blocks of each: 128 blocks a step
    random_start: bool = False  # instead of copies of the target's layers
    refined: bool = False  # also measured with several passes
    lookup: bool = False  # prompt lookup, which needs no drafter, is measured beside it


def _slotwise(gamma: float, **changes: object) -> LossConfig:
    """The text's own token on slot 1, the teacher's distribution when it committed the slot behind it."""
    return LossConfig(TermWeights(data_ce=1.0), TermWeights(teacher_kl=1.0), gamma=gamma, **changes)  # type: ignore[arg-type]


def arms(block_size: int, size: str) -> dict[str, Arm]:
    """All arms at a block size and a size of the data, each after those it starts from."""
    gamma = GAMMA[block_size]
    first, views_steps, then = STEPS[size]
    plain = dflash_baseline(LossConfig(gamma=gamma))
    views = StageOneConfig(LossConfig(gamma=gamma), ViewMix(0.35, 0.35, 0.30), ViewMix(0.8, 0.1, 0.1))
    auf = dflash_baseline(LossConfig(gamma=gamma, weighting="auf"))
    even = dflash_baseline(LossConfig(gamma=gamma, weighting="uniform"))
    soft = dflash_baseline(LossConfig(gamma=gamma, weighting="auf", auf_residual=0.33))
    half = TermWeights(data_ce=0.5, target_kl=0.5)
    of_target = dflash_baseline(LossConfig(half, half, gamma=gamma, weighting="auf"))
    distil = StageTwoConfig(_slotwise(gamma))
    equal = round(then * STEP_COST[block_size])  # plain steps that take as long as stage 2

    found = {
        "a0": Arm("one step of plain cross-entropy: as good as untrained", plain, 1, lookup=True),
        "a1": Arm("plain cross-entropy from scratch", plain, first),
        "s1": Arm("a1, then partly revealed blocks", views, views_steps, "a1", refined=True),
        "a1c": Arm("s1, then plain: control at equal steps", plain, then, "s1"),
        "auf": Arm("s1, then AUF at equal steps", auf, then, "s1"),
        "uniform": Arm("auf without its first error: plain, all slots alike", even, then, "s1"),
        "auf_soft": Arm("auf, a third of the weight kept behind the first error", soft, then, "s1"),
        "auf_target": Arm("auf, half of the loss KL to the target's distribution", of_target, then, "s1"),
        "dstill": Arm("s1, then stage 2: data on slot 1, teacher's KL behind", distil, then, "s1", refined=True),
        "a1_compute": Arm("a1, then plain for the compute of s1 and stage 2", plain, views_steps + equal, "a1"),
        "auf_compute": Arm("a1, then AUF for the compute of s1 and stage 2", auf, views_steps + equal, "a1"),
    }
    # One change to `dstill` at a time, tried at block 8.
    changes = {
        "mix": ("half KL, half data behind slot 1", {"loss": _mix(gamma)}),
        "hard": ("the teacher's tokens behind slot 1", {"loss": _hard(gamma)}),
        "auf_kl": ("KL weighed by AUF", {"loss": _slotwise(gamma, weighting="auf")}),
        "auf_mix": ("half KL, half data behind slot 1, weighed by AUF", {"loss": _mix(gamma, weighting="auf")}),
        "dpace": ("KL weighed by D-PACE", {"loss": _slotwise(gamma, weighting="dpace")}),
        "datakl": ("data up to the teacher's first error, KL behind it", {"loss": _until_error(gamma)}),
        "reverse": ("reverse KL", {"loss": _slotwise(gamma, kl_direction="reverse")}),
        "ddo": ("a push away from the stale one-pass completion", {"loss": _negative(gamma)}),
        "full": ("no curriculum: fully masked throughout", {"curriculum": CurriculumConfig(kind="full")}),
        "linear": ("linear curriculum", {"curriculum": CurriculumConfig(kind="linear", fraction=0.6)}),
        "cyclic": ("cyclic curriculum", {"curriculum": CurriculumConfig(kind="cyclic")}),
        "fixed": ("fixed mix of states (T3D)", {"curriculum": CurriculumConfig(kind="fixed")}),
        "confidence": ("teacher of 4 passes by confidence", {"order": "confidence", "passes": 4}),
    }
    for name, (about, fields) in changes.items():
        found[f"dstill_{name}"] = Arm(f"dstill, {about}", replace(distil, **fields), then, "s1")
    found["refresh"] = Arm("dstill once more, its student the teacher", distil, then, "dstill")
    best = replace(distil, loss=_mix(gamma, weighting="auf"))
    found["dstill_long"] = Arm("dstill_auf_mix, three times as long", best, 3 * then, "s1")
    found["a1c_long"] = Arm("a1c for the compute of dstill_long", plain, 3 * equal, "s1")
    found["auf_long"] = Arm("auf for the compute of dstill_long", auf, 3 * equal, "s1")
    found["a1_long"] = Arm("a1, then plain for the compute of s1 and dstill_long", plain, views_steps + 3 * equal, "a1")
    found |= _short(gamma, first // 4)
    for name in ("a1", "s1", "a1c", "auf", "dstill", "dstill_auf_mix"):
        start = None if found[name].start is None else f"deep_{found[name].start}"
        found[f"deep_{name}"] = replace(
            found[name], about=f"{DEEP} layers: {found[name].about}", start=start, num_layers=DEEP
        )
    return found


def _short(gamma: float, steps: int) -> dict[str, Arm]:
    """What makes a drafter learn faster at all: a quarter of the steps, one change each."""
    base = Arm("plain, a quarter of the steps", dflash_baseline(LossConfig(gamma=gamma)), steps)
    kl, l1 = TermWeights(data_ce=0.5, target_kl=0.5), TermWeights(data_ce=0.1, target_l1=0.9)
    losses = {
        "kl": ("half of the loss the target's distribution", LossConfig(kl, kl, gamma=gamma)),
        "l1": ("0.1 cross-entropy, 0.9 L1 to the target", LossConfig(l1, l1, gamma=gamma)),
        "auf": ("AUF from scratch", LossConfig(gamma=gamma, weighting="auf")),
        "dpace": ("D-PACE weights", LossConfig(gamma=gamma, weighting="dpace")),
        "chain": ("and the chain term", LossConfig(gamma=gamma, whole=BlockTerms(chain=1.0))),
    }
    found = {"short": base}
    for name, (about, loss) in losses.items():
        found[f"short_{name}"] = replace(base, about=f"short, {about}", objective=dflash_baseline(loss))
    found["short_random"] = replace(base, about="short, random first weights", random_start=True)
    found["short_muon"] = replace(base, about="short, Muon", optimizer="muon")
    found["short_rows"] = replace(base, about="short, 8 rows of 16 blocks", layout=(8, 16))
    found["short_anchors"] = replace(base, about="short, 2 rows of 64 blocks", layout=(2, 64))
    return found


def _mix(gamma: float, **changes: object) -> LossConfig:
    both = TermWeights(teacher_kl=0.5, data_ce=0.5)
    return LossConfig(TermWeights(data_ce=1.0), both, gamma=gamma, **changes)  # type: ignore[arg-type]


def _hard(gamma: float) -> LossConfig:
    return LossConfig(TermWeights(data_ce=1.0), TermWeights(hard_ce=1.0), gamma=gamma)


def _until_error(gamma: float) -> LossConfig:
    both = TermWeights(teacher_kl=1.0, data_ce=1.0)
    return LossConfig(
        TermWeights(data_ce=1.0), both, gamma=gamma, teacher_slots="after_error", data_slots="until_error"
    )


def _negative(gamma: float) -> LossConfig:
    return _slotwise(gamma, whole=BlockTerms(ddo_fake=0.5))


def run_config(
    arm: Arm, block_size: int, seed: int, target: str, data: str, out: str, folders: dict[str, str]
) -> RunConfig:
    """The run of an arm. `folders`: where the drafters of arms lie.

    The seed decides the first weights, the order of the data and every random draw.
    """
    new = None
    if arm.start is None:
        new = DrafterShape(
            mask_token_id=2,
            num_layers=arm.num_layers,
            block_size=block_size,
            target_layer_ids=TAPS,
            init_from_layers=None if arm.random_start else tuple(range(4 - arm.num_layers, 4)),
        )
    rows, anchors = arm.layout
    rate = 2.5e-3 if arm.start is None else arm.learning_rate
    return RunConfig(
        target=target,
        data=data,
        out=out,
        objective=arm.objective,
        optimizer=OptimizerConfig(learning_rate=rate, kind=arm.optimizer),
        train=TrainConfig(total_steps=arm.steps, save_every=500, keep_last=1, log_every=20, seed=seed, progress=False),
        batches=PipelineConfig(seq_len=PROMPT_TOKENS + NEW_TOKENS, batch_size=rows, seed=seed),
        new=new,
        start_from=None if arm.start is None else folders[arm.start],
        anchors_per_row=anchors,
        compute_dtype="float32",
    )
