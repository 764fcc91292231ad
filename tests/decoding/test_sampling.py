"""The draw: filters against NumPy, ties, edges, and the exact distribution in the long run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoding import numpy_filter
from tiny_models import markov_target

from dstill_jax.decoding import sampling
from dstill_jax.decoding.sampling import Draw, SamplingConfig, filter_logits
from dstill_jax.decoding.session import Request, Session
from dstill_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("quick_compilation")

filtered = jax.jit(filter_logits)
choose = jax.jit(sampling.choose, static_argnames=("greedy", "filtered"))


@pytest.mark.parametrize("top_k", [None, 1, 3, 9, 100])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.3, 0.77, 1.0])
def test_filters_equal_numpy_ties_included(top_k, top_p):
    random = np.random.default_rng(0)
    logits = np.concatenate([random.normal(size=(40, 9)) * 2, random.integers(0, 4, (40, 9))]).astype(np.float32)
    logits[3] = 1.0  # all tied
    ours = np.asarray(filtered(logits, Draw.of(SamplingConfig(1.0, top_k, top_p))))
    for row, kept in zip(logits, ours, strict=True):
        np.testing.assert_array_equal(np.isfinite(kept), np.isfinite(numpy_filter(row, top_k, top_p)))
        np.testing.assert_array_equal(kept[np.isfinite(kept)], row[np.isfinite(kept)])


def test_top_p_of_one_cuts_nothing_however_the_sum_rounds():
    logits = np.random.default_rng(0).normal(size=(1, 20000)).astype(np.float32)
    assert np.isfinite(filtered(logits, Draw.of(SamplingConfig(1.0, 20000, 1.0)))).all()


def test_a_banned_token_stays_banned_behind_a_filter_wider_than_the_vocabulary():
    logits = np.array([[0.0, -np.inf, 1.0]], np.float32)
    ours = np.asarray(filtered(logits, Draw.of(SamplingConfig(1.0, 50, 0.9999))))
    assert np.isfinite(ours).tolist() == [[True, False, True]]


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = jnp.asarray([[[0.0, 2.0, 2.0, 1.0]]])
    draw = Draw.of(SamplingConfig())
    assert (
        choose(logits, jnp.zeros((1, 2), jnp.uint32), jnp.zeros((1, 1), jnp.int32), draw, greedy=True, filtered=False)
        == 1
    )


def test_the_first_argmax_is_that_of_numpy():
    random = np.random.default_rng(0)
    for shape in ((50,), (3, 50), (2, 3, 1), (2, 1, 700)):
        scores = random.integers(0, 4, shape).astype(np.float32)  # many ties
        scores[..., 0] = -np.inf
        np.testing.assert_array_equal(sampling.first_argmax(jnp.asarray(scores)), scores.argmax(-1))
    assert 0 <= int(sampling.first_argmax(jnp.full(7, jnp.nan))) < 7  # a token, whatever the target computes


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(1.0), SamplingConfig(0.7, top_k=4, top_p=0.8)])
def test_logits_of_some_tokens_draw_as_if_the_others_were_impossible(config):
    random = np.random.default_rng(1)
    logits = jnp.asarray(random.normal(size=(2, 9, 40)), jnp.float32)
    keys, positions = jnp.asarray([[1, 2], [3, 4]], jnp.uint32), jnp.asarray(random.integers(0, 99, (2, 9)))
    tokens = jnp.asarray([1, 5, 6, 20, 39])
    possible = jnp.full_like(logits, -jnp.inf).at[..., tokens].set(logits[..., tokens])
    static = {"greedy": config.greedy, "filtered": config.top_k is not None}
    whole = choose(possible, keys, positions, Draw.of(config), **static)
    part = sampling.choose(logits[..., tokens], keys, positions, Draw.of(config), **static, columns=(tokens, 40))
    np.testing.assert_array_equal(part, whole)


def test_a_draw_depends_on_request_and_position_only():
    """The same logits at the same position give the same token, whatever the batch around them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 30)), jnp.float32)
    keys = jnp.asarray([[1, 2], [3, 4]], jnp.uint32)
    positions = jnp.asarray([[4, 5, 6, 7, 8], [9, 10, 11, 12, 13]])
    draw = Draw.of(SamplingConfig(5.0))
    whole = np.asarray(choose(logits, keys, positions, draw, greedy=False, filtered=False))
    part = choose(logits[1:, 2:4], keys[1:], positions[1:, 2:4], draw, greedy=False, filtered=False)
    assert np.asarray(part).tolist() == whole[1:, 2:4].tolist()
    flat = jnp.zeros((2, 200, 30))
    where = jnp.broadcast_to(jnp.arange(200), (2, 200))
    noise_only = np.asarray(choose(flat, keys, where, draw, greedy=False, filtered=False))
    assert len(np.unique(noise_only)) == 30 and (noise_only[0] != noise_only[1]).mean() > 0.8


LOGITS = np.random.default_rng(4).normal(size=(7, 7)) * 1.5


@pytest.fixture(scope="module")
def chain():
    return markov_target(LOGITS)


@pytest.mark.parametrize(
    "method, temperature, top_k, top_p",
    [
        pytest.param("autoregressive", 1.0, None, None, marks=pytest.mark.slow),
        ("lookup", 1.0, None, 1.0),
        ("lookup", 1.0, 3, None),
        ("lookup", 1.0, None, 0.8),
        ("lookup", 0.7, 4, 0.9),
    ],
)
def test_long_run_frequencies_are_the_exact_probabilities(chain, method, temperature, top_k, top_p):
    """A target whose next-token distribution is known in closed form; a chi-square test over all transitions."""
    session = Session(
        chain,
        method=method,
        batch_size=16,
        max_prompt_tokens=4,
        max_new_tokens=110,
        sampling=SamplingConfig(temperature, top_k, top_p),
        stop_token_ids=[],
    )
    counts = np.zeros((7, 7))
    for done in session.run([Request(i, [i % 7], seed=1) for i in range(48)], rounds_per_call=40):
        np.add.at(counts, ([done.id % 7, *done.tokens[:-1]], done.tokens), 1)
    assert counts.sum() == 48 * 110
    statistic, freedom = 0.0, 0
    for token in range(7):
        kept = numpy_filter(LOGITS[token] / temperature, top_k, top_p)
        p = np.exp(kept - kept.max())
        p /= p.sum()
        assert counts[token, p == 0].sum() == 0
        support = p > 0
        expected = counts[token].sum() * p[support]
        statistic += ((counts[token, support] - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
        freedom += support.sum() - 1
    # Upper 0.01 % point of chi-square, by Wilson and Hilferty's cube-root normal approximation.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, (statistic, freedom, bound)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 5}, "top_k=5 filters what is drawn, and temperature=0"),
        ({"top_p": 0.9}, "top_p=0.9 filters what is drawn, and temperature=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        SamplingConfig(**changes)
