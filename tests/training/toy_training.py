"""A toy run for the training tests: importable, and a script that a test can kill.

`python toy_training.py RUN_DIR [KEY=VALUE ...]` trains it, with overrides of `TrainConfig`.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dstill_jax.training import Interrupted, OptimizerConfig, TrainConfig, train

WIDTH, VOCAB, ROWS, LENGTH = 8, 11, 4, 6
EVALUATING = "evaluating"  # a file that is in the run folder while `evaluation` works
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.1)


def toy_params(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)
    return {"layers_0": {"norm": {"scale": np.ones(WIDTH, np.float32)}}, "head": {"kernel": kernel}}


def toy_frozen() -> dict:
    return {"embedding": jnp.asarray(np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype(np.float32))}


def toy_loss(params, frozen, batch, key, step):
    """Cross-entropy of the token itself through a noisy embedding; the noise makes every step depend on its key."""
    x = frozen["embedding"][batch["tokens"]]
    x = x + 0.1 * jax.random.normal(key, x.shape)
    x = jnp.einsum("bsd,d->bsd", x, params["layers_0"]["norm"]["scale"])
    log_probs = jax.nn.log_softmax(jnp.einsum("bsd,dv->bsv", x, params["head"]["kernel"]))
    mask = batch["loss_mask"].astype(jnp.float32)
    per_token = -jnp.take_along_axis(log_probs, batch["tokens"][..., None], axis=-1)[..., 0]
    right = (jnp.argmax(log_probs, axis=-1) == batch["tokens"]).astype(jnp.float32)
    return (per_token * mask).sum(), mask.sum(), {"accuracy": ((right * mask).sum(), mask.sum())}


class ToyData:
    """Random rows, a pure function of the step; `empty` lists steps without a supervised token."""

    fingerprint = "toy"

    def __init__(self, accumulate: int = 1, empty: tuple[int, ...] = (), delay: float = 0.0) -> None:
        self._rows, self._empty, self._delay = ROWS * accumulate, empty, delay

    def batch(self, step: int) -> dict[str, np.ndarray]:
        time.sleep(self._delay)
        rng = np.random.default_rng((7, step))
        tokens = rng.integers(0, VOCAB, size=(self._rows, LENGTH), dtype=np.int32)
        mask = rng.random((self._rows, LENGTH)) < 0.7
        return {"tokens": tokens, "loss_mask": mask & (step not in self._empty)}


def run_toy(run_dir: Path, *, data=None, loss_fn=toy_loss, on_step=None, metadata=None, optimizer=OPTIMIZER, **config):
    train_config = TrainConfig(**{"total_steps": 60, "save_every": 10, "progress": False, "seed": 3, **config})
    data = data or ToyData(train_config.accumulate_steps, empty=(5, 31))
    metadata = metadata or {"stage": "toy", "target_fingerprint": "abc", "config": {"block_size": 8}}
    return train(loss_fn, toy_frozen(), toy_params(), data, train_config, optimizer, run_dir, metadata, on_step)


def evaluation(run_dir: Path, every: int = 5, seconds: float = 0.0):
    """An `on_step` that measures something of the weights every few steps, and takes its time."""

    def on_step(step: int, state: dict) -> dict | None:
        if step % every:
            return None
        (run_dir / EVALUATING).touch()
        time.sleep(seconds)
        value = float(jnp.square(state["ema"]["head"]["kernel"]).sum())
        (run_dir / EVALUATING).unlink()
        return {"eval/norm": value}

    return on_step


if __name__ == "__main__":
    overrides = {k: int(v) for k, v in (a.split("=") for a in sys.argv[2:])}
    delay = overrides.pop("delay_ms", 0) / 1000
    evaluated = overrides.pop("evaluate_ms", None)
    on_step = None if evaluated is None else evaluation(Path(sys.argv[1]), seconds=evaluated / 1000)
    source = ToyData(overrides.get("accumulate_steps", 1), empty=(5, 31), delay=delay)
    try:
        run_toy(Path(sys.argv[1]), data=source, on_step=on_step, **overrides)
    except Interrupted as e:
        print(e)
        sys.exit(130)
