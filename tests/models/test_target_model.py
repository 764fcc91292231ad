"""The target: golden logits, caches, chunked prefill, stacked layers, taps, rotary scaling, dtypes, padding."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_target, spread, stack_layers, target_config

from dstill_jax.config import Llama3RopeScaling, RopeConfig
from dstill_jax.errors import UserError
from dstill_jax.models import target as target_lib
from dstill_jax.models.attention import rope_inverse_frequencies, rope_tables
from dstill_jax.models.layers import store_input_first, store_output_first
from dstill_jax.models.target import Target
from dstill_jax.weights.load import load_target

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCE = Path(__file__).parents[1] / "reference"
forward = jax.jit(target_lib.forward, static_argnames=("config", "tap_ids"))
TAPS = (0, 1)


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 37, (2, 12)).astype(np.int32)


@pytest.fixture(scope="module")
def plain(target, tokens):
    """Hidden states and taps of two whole rows, without a cache."""
    return forward(target.config, target.params, tokens, np.tile(np.arange(12), (2, 1)), tap_ids=TAPS)


@pytest.mark.parametrize("name, taps", [("qwen3_tiny", (1, 3, 5)), ("llama_tied", (1, 3))])
def test_logits_and_taps_equal_an_independent_implementation(name, taps):
    expected = np.load(REFERENCE / name / "expected.npz")
    target = load_target(REFERENCE / name / "target", scan_layers=True)
    prompt = expected["prompt"].astype(np.int32)
    out = forward(target.config, target.params, prompt, np.arange(prompt.shape[1])[None], tap_ids=taps)
    logits = target_lib.head(target.config, target.params, out.hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected["target_logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.taps, expected["context_features"], rtol=1e-4, atol=1e-4)


def with_cache(target, tokens, pieces, cache, start=None):
    """Feeds rows piece by piece; returns hidden states and taps of all tokens, and the cache."""
    at = np.zeros(len(tokens), np.int32) if start is None else start
    parts = []
    for piece in pieces:
        new = np.stack([row[a : a + piece] for row, a in zip(tokens, at, strict=True)])
        positions = at[:, None] + np.arange(piece)
        out = forward(target.config, target.params, new, positions, cache, at, tap_ids=TAPS)
        cache, at = out.cache, at + piece
        parts.append((out.hidden, out.taps))
    return *(np.concatenate(x, 1) for x in zip(*parts, strict=True)), cache


def garbage_cache(target, rows, capacity, stacked=False):
    """Unwritten slots hold large numbers: masked scores are finite, so garbage must vanish, but 0 * NaN would not.

    Nothing in the library puts a NaN there: slots are zero or hold values computed earlier.
    """
    cache = target_lib.init_cache(target.config, rows, capacity, jnp.float32, stacked)
    return jax.tree.map(lambda x: jnp.full_like(x, 1e6), cache)


def test_chunked_prefill_and_decoding_with_a_cache_equal_one_pass_without(target, tokens, plain):
    hidden, taps, _ = with_cache(target, tokens, [5, 1, 1, 5], garbage_cache(target, 2, 16))
    np.testing.assert_allclose(hidden, plain.hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(taps, plain.taps, rtol=1e-4, atol=1e-5)


def test_rows_advance_by_different_amounts_and_roll_back_for_free(target, tokens, plain):
    _, _, cache = with_cache(target, tokens, [5], garbage_cache(target, 2, 16))
    wrong = np.roll(tokens, 1, axis=1)
    out = forward(target.config, target.params, wrong[:, :4], np.array([[5], [5]]) + np.arange(4), cache, np.full(2, 5))
    at = np.array([5, 3], np.int32)  # the second row goes back over tokens it had kept; both overwrite rejected ones
    hidden, _, _ = with_cache(target, tokens, [5], out.cache, at)
    for row, start in enumerate(at):
        np.testing.assert_allclose(hidden[row], np.asarray(plain.hidden)[row, start : start + 5], rtol=1e-4, atol=1e-5)


def test_stacked_and_unrolled_layers_agree_with_and_without_a_cache(target, tokens, plain):
    stacked = Target(target.config, stack_layers(target.params), "memory", "")
    assert target_lib.is_stacked(stacked.params) and not target_lib.is_stacked(target.params)
    out = forward(target.config, stacked.params, tokens, np.tile(np.arange(12), (2, 1)), tap_ids=TAPS)
    np.testing.assert_allclose(out.hidden, plain.hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.taps, plain.taps, rtol=1e-5, atol=1e-6)
    hidden, _, _ = with_cache(stacked, tokens, [12], garbage_cache(target, 2, 16, stacked=True))
    np.testing.assert_allclose(hidden, plain.hidden, rtol=1e-4, atol=1e-5)
    back = target_lib.unstack_layers(stacked.params)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, target.params))


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_stored_output_first_compute_the_same(tied):
    target = random_target(tie_embeddings=tied, attention_bias=True)
    turned = store_output_first(target.params)
    assert "kernel" not in {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(turned)}
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), store_input_first(turned), target.params))
    row, positions = np.array([[4, 0, 36], [1, 2, 3]]), np.tile(np.arange(3), (2, 1))
    outs = [forward(target.config, params, row, positions, tap_ids=TAPS) for params in (target.params, turned)]
    np.testing.assert_allclose(outs[0].hidden, outs[1].hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outs[0].taps, outs[1].taps, rtol=1e-5, atol=1e-5)
    whole = np.asarray(outs[0].hidden) @ np.asarray(target_lib.head_matrix(target.config, target.params))
    for params in (target.params, turned):
        matrix = target_lib.head_matrix(target.config, params)
        np.testing.assert_array_equal(
            target_lib.head_rows(target.config, params, np.array([5, 0])), np.asarray(matrix).T[[5, 0]]
        )
        np.testing.assert_allclose(target_lib.head(target.config, params, outs[0].hidden), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_tap_is_the_residual_stream_after_its_layer(stacked):
    """Layer k adds the constant k + 1, through the bias of its attention output: taps can be read off exactly."""
    config = target_config(num_layers=6, attention_bias=True, qk_norm=False)
    shapes = jax.eval_shape(functools.partial(target_lib.init_params, config), jax.random.key(0))
    params = spread(shapes, 3)
    for i in range(6):
        layer = params[f"layers_{i}"]
        layer["mlp"]["down_proj"]["kernel"] *= 0
        layer["attention"]["o_proj"] = {"kernel": jnp.zeros((32, 16)), "bias": jnp.full(16, i + 1.0)}
    params["embed"]["embedding"] = jnp.round(params["embed"]["embedding"] * 8)
    row = np.array([[4, 0, 36]])
    embedded = np.asarray(params["embed"]["embedding"])[row]
    given = stack_layers(params) if stacked else params
    tap_ids = (1, 5, 0, 3)  # any order, first and last layer included
    out = forward(config, given, row, np.arange(3)[None], tap_ids=tap_ids)
    for tap, layer in zip(np.split(np.asarray(out.taps), 4, axis=-1), tap_ids, strict=True):
        assert (tap == embedded + sum(range(1, layer + 2))).all()
    last = embedded + 21
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(params["norm"]["scale"])
    np.testing.assert_allclose(out.hidden, normed, rtol=1e-5)


@pytest.mark.parametrize("tap_ids", [(0, 0), (2,), (-1,)])
def test_taps_that_do_not_exist_or_repeat_are_refused(target, tokens, tap_ids):
    with pytest.raises(UserError, match="tap"):
        target_lib.forward(target.config, target.params, tokens, tokens, tap_ids=tap_ids)


def test_a_token_sees_itself_and_the_past_of_its_document_only():
    ids = np.array([[1, 1, 2, 2, 2, 0]])
    mask = np.asarray(target_lib.causal_mask(6, ids))[0]
    for i, j in np.ndindex(6, 6):
        assert mask[i, j] == (j <= i and ids[0, i] == ids[0, j])


def test_packed_documents_are_the_documents_alone(target, tokens):
    ids, positions = np.array([[1] * 5 + [2] * 7]), np.array([[*range(5), *range(7)]])
    row = tokens[:1]

    def packed(row):
        return forward(
            target.config,
            target.params,
            row,
            positions,
            tap_ids=TAPS,
            attention_mask=target_lib.causal_mask(12, jnp.asarray(ids)),
        )

    first = packed(row)
    other = np.concatenate([(row[:, :5] + 1) % 37, row[:, 5:]], 1)
    changed = packed(other)
    assert not (np.asarray(changed.hidden)[:, :5] == np.asarray(first.hidden)[:, :5]).all()
    for name in ("hidden", "taps"):
        second = np.asarray(getattr(first, name))[:, 5:]
        assert (np.asarray(getattr(changed, name))[:, 5:] == second).all()
        padded = np.concatenate([row[:, 5:], row[:, :5]], 1)  # what follows a document is invisible to it
        alone = forward(target.config, target.params, padded, np.arange(12)[None], tap_ids=TAPS)
        np.testing.assert_allclose(second, np.asarray(getattr(alone, name))[:, :7], rtol=1e-4, atol=1e-5)


def test_bfloat16_parameters_give_bfloat16_states_near_the_float32_ones(target, tokens, plain):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params)
    out = forward(target.config, params, tokens, np.tile(np.arange(12), (2, 1)), tap_ids=TAPS)
    assert out.hidden.dtype == out.taps.dtype == jnp.bfloat16
    assert target_lib.head(target.config, params, out.hidden).dtype == jnp.float32
    error = np.abs(np.asarray(out.hidden, np.float32) - np.asarray(plain.hidden))
    assert error.mean() < 0.05 * np.abs(np.asarray(plain.hidden)).mean()
    assert Target(target.config, params, "", "").dtype == jnp.bfloat16


def test_tied_and_untied_heads_are_the_matrices_they_claim_to_be(target):
    hidden = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    for config, matrix in (
        (target.config, target.params["head"]["kernel"]),
        (target_config(tie_embeddings=True), target.params["embed"]["embedding"].T),
    ):
        np.testing.assert_array_equal(target_lib.head_matrix(config, target.params), matrix)
        np.testing.assert_allclose(
            target_lib.head(config, target.params, hidden), hidden @ np.asarray(matrix), rtol=1e-5, atol=1e-5
        )


def test_llama3_frequency_scaling_follows_its_definition():
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
    theta, head_dim = 500000.0, 128
    ours = np.asarray(rope_inverse_frequencies(RopeConfig(theta, scaling), head_dim))
    kinds = set()
    for i in range(head_dim // 2):
        frequency = 1 / theta ** (2 * i / head_dim)
        wavelength = 2 * np.pi / frequency
        if wavelength > 8192 / 1.0:
            kinds.add("slowed")
            frequency /= 8.0
        elif wavelength >= 8192 / 4.0:
            kinds.add("blended")
            share = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - share) * frequency / 8.0 + share * frequency
        np.testing.assert_allclose(ours[i], frequency, rtol=2e-5)
    assert kinds == {"slowed", "blended"}


def test_rotary_tables_are_cosines_of_absolute_positions():
    cos, sin = rope_tables(RopeConfig(1e6), 8, np.array([[0, 3, 1000]]))
    angles = np.array([0, 3, 1000])[:, None] / 1e6 ** (np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-4)
