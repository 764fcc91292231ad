"""The drafter: golden logits, what slots see, padding, partial outputs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_drafter, random_target

from dstill_jax.blocks import Sight
from dstill_jax.config import default_target_layer_ids
from dstill_jax.decoding.generate import draft_logits
from dstill_jax.errors import UserError
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.weights.load import load_drafter, load_target

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCE = Path(__file__).parents[1] / "reference"


@pytest.mark.parametrize("name, draft", [("qwen3_tiny", "draft"), ("llama_tied", "draft")])
def test_draft_logits_equal_an_independent_implementation(name, draft):
    expected = np.load(REFERENCE / name / "expected.npz")
    target = load_target(REFERENCE / name / "target", scan_layers=True)
    drafter = load_drafter(REFERENCE / name / draft, target)
    for block, logits in (("block", "draft_logits"), ("block_partial", "draft_logits_partial")):
        ours = draft_logits(target, drafter, expected["prompt"][0], expected[block][0])
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, expected[logits][0], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def case():
    """A drafter of two layers and the arrays of one pass: 2 rows, 3 blocks, a context of 9."""
    target = random_target()
    drafter = random_drafter(target, num_layers=2)
    random = np.random.default_rng(0)
    arrays = {
        "x": random.normal(size=(2, 3, 5, 16)).astype(np.float32),
        "positions": (np.array([[2, 4, 8]] * 2)[..., None] + np.arange(5)).astype(np.int32),
        "taps": random.normal(size=(2, 9, 32)).astype(np.float32),
        "anchors": np.array([[2, 4, 8]] * 2),
    }
    return drafter, arrays


def run(config, params, x, positions, taps, anchors, query_slots=None, first=0):
    c = drafter_lib.project_context(config, params, taps)
    context_positions = jnp.broadcast_to(first + jnp.arange(taps.shape[1]), taps.shape[:2])
    context = drafter_lib.context_kv(config, params, c, context_positions)
    return drafter_lib.denoise(config, params, x, positions, context, Sight(anchors), query_slots)


run = jax.jit(run, static_argnames="config")


@pytest.mark.parametrize("causal", [False, True])
def test_slots_see_both_directions_unless_the_config_says_causal(case, causal):
    drafter, arrays = case
    config = random_drafter(random_target(), num_layers=2, causal=causal).config
    before = np.asarray(run(config, drafter.params, **arrays))
    x = arrays["x"].copy()
    x[:, :, 4] += 1
    after = np.asarray(run(config, drafter.params, **{**arrays, "x": x}))
    assert (after[:, :, 4] != before[:, :, 4]).any(-1).all()
    assert (after[:, :, :4] == before[:, :, :4]).all() == causal
    x = arrays["x"].copy()
    x[:, :, 1] += 1
    after = np.asarray(run(config, drafter.params, **{**arrays, "x": x}))
    assert (after[:, :, 2] != before[:, :, 2]).any(-1).all()


def test_a_block_never_sees_another_nor_hidden_context_whatever_it_holds(case):
    drafter, arrays = case
    before = np.asarray(run(drafter.config, drafter.params, **arrays))
    x, taps = arrays["x"].copy(), arrays["taps"].copy()
    x[:, [0, 2]] = 1e6
    taps[:, 4:] = -1e6
    after = np.asarray(run(drafter.config, drafter.params, **{**arrays, "x": x, "taps": taps}))
    assert (after[:, 1] == before[:, 1]).all()  # the block anchored at 4
    assert (after[:, 2] != before[:, 2]).any()


def test_a_block_without_context_is_finite_forward_and_backward(case):
    drafter, arrays = case
    anchors = np.zeros_like(arrays["anchors"])

    def total(params, taps):
        return run(drafter.config, params, arrays["x"], arrays["positions"], taps, anchors).sum()

    out, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(drafter.params, arrays["taps"])
    assert np.isfinite(out)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert not np.asarray(gradients[1]).any()


def test_outputs_of_some_slots_are_those_of_all(case):
    drafter, arrays = case
    whole = np.asarray(run(drafter.config, drafter.params, **arrays))
    slots = np.broadcast_to(np.array([3, 1]), (2, 3, 2))
    some = run(drafter.config, drafter.params, **arrays, query_slots=slots)
    np.testing.assert_allclose(some, whole[:, :, [3, 1]], rtol=1e-5, atol=1e-6)


def test_shifting_all_positions_changes_nothing(case):
    """Rotary positions are relative: what matters is where the block stands in its context."""
    drafter, arrays = case
    outs = [
        run(drafter.config, drafter.params, **{**arrays, "positions": arrays["positions"] + shift}, first=shift)
        for shift in (0, 50)
    ]
    np.testing.assert_allclose(outs[0], outs[1], rtol=1e-3, atol=1e-4)
    apart = run(drafter.config, drafter.params, **arrays, first=50)
    assert (np.abs(np.asarray(apart) - outs[0]) > 1e-2).any()


@pytest.mark.parametrize("layers, taps, expected", [(36, 5, (1, 9, 17, 25, 33)), (8, 3, (1, 3, 5)), (28, 1, (14,))])
def test_default_taps_are_spread_evenly(layers, taps, expected):
    assert default_target_layer_ids(layers, taps) == expected


@pytest.mark.parametrize("layers, taps", [(4, 2), (8, 0), (8, 6)])
def test_more_taps_than_layers_are_refused(layers, taps):
    with pytest.raises(UserError, match=f"{taps} taps"):
        default_target_layer_ids(layers, taps)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 1}, "block_size=1"),
        ({"mask_token_id": 37}, "mask_token_id=37"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (0, 2)}, "target_layer_ids has 2"),
        ({"target_layer_ids": (-1, 1)}, "target_layer_ids has -1"),
        ({"target_layer_ids": (1, 1)}, "target_layer_ids.*more than once"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads=3"),
    ],
)
def test_drafters_that_cannot_work_are_refused_by_field(changes, message):
    with pytest.raises(UserError, match=message):
        random_drafter(random_target(), **changes)
