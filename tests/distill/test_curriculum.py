"""Which state of a trajectory is shown: the formula of each kind, and what sampling makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.distill.config import CurriculumConfig
from dstill_jax.distill.curriculum import sample_state, state_log_weights
from dstill_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("quick_compilation")

PASSES, K = 4, 5
MASKED = np.array([1.0, 0.75, 0.5, 0.25])  # of the states of a trajectory that commits a slot a pass


def expected(kind: str, progress: float, replay: float = 0.0, block: int = 0) -> np.ndarray:
    share = min(progress / 0.4, 1.0)
    full = np.array([1.0, 0, 0, 0])
    if kind == "full":
        return full
    if kind == "cyclic":
        return np.eye(4)[block % 4]
    if kind == "fixed":
        weights = MASKED**8.0
    elif share >= 1:
        weights = np.array([1 - replay] + [replay / 3] * 3)
    elif kind == "linear":
        weights = (MASKED >= 0.3 + 0.7 * share).astype(float)
    else:
        weights = MASKED ** (8.0 * share)
    return weights / weights.sum()


@pytest.mark.parametrize("progress", [0.0, 0.2, 0.4, 0.99])
@pytest.mark.parametrize("kind", ["power", "linear", "cyclic", "fixed", "full"])
def test_state_distribution_follows_the_formula(kind, progress):
    masked = jnp.broadcast_to(jnp.asarray(MASKED, jnp.float32), (1, 6, 4))
    for replay in (0.0, 0.1) if kind in ("power", "linear") else (0.0,):
        config = CurriculumConfig(kind, replay=replay)
        weights = jax.nn.softmax(state_log_weights(config, masked, jnp.float32(progress)), axis=-1)
        for block in range(6):
            np.testing.assert_allclose(weights[0, block], expected(kind, progress, replay, block), atol=1e-6)


@pytest.mark.parametrize("kind", ["cyclic", "fixed", "full"])
def test_replay_of_a_curriculum_without_an_end_is_refused(kind):
    with pytest.raises(UserError, match=f"replay=0.1 begins where a curriculum has ended, and kind='{kind}'"):
        CurriculumConfig(kind, replay=0.1)


sample = jax.jit(sample_state, static_argnames=("config", "passes"))
COMMIT = np.array([0, 2, 1, 4, 3], np.int32)  # slots in the order in which they were committed


@pytest.mark.parametrize("kind, progress", [("power", 0.2), ("linear", 0.0), ("power", 0.4)])
def test_sampled_states_are_prefixes_of_the_trajectory_in_their_shares(kind, progress):
    number = 8000
    commit = np.broadcast_to(COMMIT, (1, number, K))
    revealed = np.asarray(sample(CurriculumConfig(kind), jax.random.key(1), commit, PASSES, progress).revealed)[0]
    level = revealed[:, 1:].sum(1)
    assert (revealed == (COMMIT <= level[:, None])).all()
    counts, share = np.bincount(level, minlength=4), expected(kind, progress)
    deviation = np.sqrt(number * share * (1 - share))
    assert (np.abs(counts - number * share) <= 4.5 * deviation).all()


def test_a_state_with_nothing_left_to_predict_is_never_shown():
    """A teacher that was done after one pass: only the fully masked state is left."""
    commit = np.broadcast_to(np.array([0, 1, 1, 1, 1], np.int32), (1, 500, K))
    for kind in ("power", "linear", "cyclic", "fixed", "full"):
        revealed = np.asarray(sample(CurriculumConfig(kind), jax.random.key(0), commit, PASSES, 0.0).revealed)
        assert (revealed == (np.arange(K) == 0)).all()


def test_replay_shows_partly_masked_states_after_the_ramp():
    commit = np.broadcast_to(COMMIT, (1, 8000, K))
    revealed = np.asarray(sample(CurriculumConfig(replay=0.3), jax.random.key(0), commit, PASSES, 0.7).revealed)[0]
    assert abs(revealed[:, 1:].any(1).mean() - 0.3) < 0.025


@pytest.mark.parametrize("changes", [{"kind": "steep"}, {"fraction": 0.0}, {"power": -1.0}, {"replay": 1.5}])
def test_bad_curricula_are_refused(changes):
    with pytest.raises(UserError, match="CurriculumConfig"):
        CurriculumConfig(**changes)
