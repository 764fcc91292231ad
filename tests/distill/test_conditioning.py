"""What a block may depend on; features from the batch; scaled taps; rows with nothing to learn from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import valid_blocks
from tiny_models import random_drafter, random_target

from dstill_jax import blocks as blocks_lib
from dstill_jax.blocks import Sight, ViewMix
from dstill_jax.decoding.generate import draft_logits
from dstill_jax.distill import conditioning
from dstill_jax.distill.conditioning import Conditioned, Task
from dstill_jax.distill.config import StageOneConfig, dflash_baseline
from dstill_jax.distill.stage_one import stage_one_loss
from dstill_jax.losses.config import LossConfig, TermWeights
from dstill_jax.models import target as target_lib

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
stage_one = jax.jit(stage_one_loss, static_argnames=("task", "config"))
TARGET_TERMS = TermWeights(data_ce=1.0, target_kl=0.5, target_l1=0.5)  # reads everything a batch can bring
BASELINE = dflash_baseline(LossConfig(first=TARGET_TERMS, rest=TARGET_TERMS))


def test_a_block_depends_on_features_before_its_anchor_only():
    """Anchors unsorted, overlapping and duplicated: by derivatives, which would show the smallest leak."""
    target = random_target()
    drafter = random_drafter(target, block_size=16)
    task = Task(target.config, drafter.config, 5)
    random = np.random.default_rng(0)
    S, anchors = 64, np.array([[40, 10, 14, 0, 10]])
    valid, ids = np.ones((1, 5), bool), np.ones((1, S), np.int32)
    tokens = random.integers(0, 36, (1, S)).astype(np.int32)
    blocks = blocks_lib.cut_blocks(tokens, ids > 0, ids, np.arange(S)[None], anchors, valid, 16)
    block_tokens = blocks_lib.mask_tokens(blocks.tokens, jnp.arange(16) == 0, drafter.config.mask_token_id)
    sight = Sight(anchors, valid, ids)
    probe = jnp.asarray(random.normal(size=(16, 16)), jnp.float32)

    def outputs(taps):
        data = Conditioned(blocks, taps, taps[..., :16], np.arange(S)[None], sight)
        context = conditioning.project(task, drafter.params, data)
        frozen = conditioning.Frozen(target.params["embed"]["embedding"], None, None, None)
        hidden = conditioning.run_pass(task, frozen, drafter.params, data, context, block_tokens)
        return jnp.einsum("bakd,kd->a", hidden, probe), hidden

    taps = random.normal(size=(1, S, 32)).astype(np.float32)
    jacobian, hidden = jax.jit(jax.jacrev(outputs, has_aux=True))(taps)
    influence = np.abs(np.asarray(jacobian)[:, 0]).sum(-1)  # [A, S]
    for i, a in enumerate(anchors[0]):
        assert (influence[i, :a] > 0).all() and (influence[i, a:] == 0).all()
    hidden = np.asarray(hidden)
    assert (hidden[:, 1] == hidden[:, 4]).all()  # the duplicates
    later = taps.copy()
    later[:, 14:] = 1e4
    changed = np.asarray(jax.jit(outputs)(later)[1])
    assert (changed[:, 1:] == hidden[:, 1:]).all() and (changed[:, 0] != hidden[:, 0]).any()


@functools.partial(jax.jit, static_argnames="task")
def all_masked(task, frozen, params, batch, key=KEY):
    """Anchors, validity and drafter outputs of fully masked blocks."""
    data = conditioning.condition(task, frozen, batch, key)
    slots = jnp.arange(task.drafter.block_size) == 0
    tokens = blocks_lib.mask_tokens(data.blocks.tokens, slots, task.drafter.mask_token_id)
    hidden = conditioning.run_pass(task, frozen, params, data, conditioning.project(task, params, data), tokens)
    return data.blocks, hidden


def by_anchor(blocks, hidden, row):
    """{anchor: outputs} of the valid blocks of a row."""
    return {
        int(a): np.asarray(h)
        for a, ok, h in zip(blocks.anchors[row], blocks.valid[row], hidden[row], strict=True)
        if ok
    }


def test_packed_documents_do_not_touch_each_other(case):
    before = by_anchor(*all_masked(case.task, case.frozen, case.drafter.params, case.batch), 0)
    tokens = case.batch["tokens"].copy()
    tokens[0, :9] = (tokens[0, :9] + 5) % 36
    batch = {**case.batch, "tokens": tokens}
    after = by_anchor(*all_masked(case.task, case.frozen, case.drafter.params, batch), 0)
    assert before.keys() == after.keys() and 8 not in before  # 8 is the last token of the first document
    for a in before:
        assert (before[a] == after[a]).all() == (a >= 9)
    alone = {name: np.zeros_like(value) for name, value in case.batch.items()}
    for name, value in case.batch.items():
        alone[name][0, :7] = value[0, 9:]
    single = by_anchor(*all_masked(case.task, case.frozen, case.drafter.params, alone), 0)
    assert sorted(single) == sorted(a - 9 for a in before if a >= 9)
    for a, hidden in single.items():
        np.testing.assert_allclose(hidden, before[a + 9], rtol=1e-4, atol=1e-5)


def test_a_training_block_is_the_block_that_decoding_builds(case):
    """The gap between training and service, measured: logits of the same block, element by element."""
    blocks, hidden = all_masked(case.task, case.frozen, case.drafter.params, case.batch)
    found = {row: by_anchor(blocks, hidden, row) for row in (0, 1)}
    mask = case.drafter.config.mask_token_id
    for tokens, a, _, (row, anchor) in valid_blocks(case.batch, 5):
        if (row, anchor) in ((0, 12), (1, 5)):
            block = [tokens[a], mask, mask, mask, mask]
            served = jax.jit(functools.partial(draft_logits, case.target, case.drafter, tokens[:a], block))()
            trained = target_lib.head(case.target.config, case.target.params, found[row].pop(anchor))
            np.testing.assert_allclose(trained, served, rtol=1e-4, atol=1e-4)
    assert sum(map(len, found.values())) == int(blocks.valid.sum()) - 2


def features_of(case, dtype):
    batch = case.batch
    mask = target_lib.causal_mask(16, jnp.asarray(batch["document_ids"]))
    out = jax.jit(target_lib.forward, static_argnames=("config", "tap_ids"))(
        case.target.config, case.target.params, batch["tokens"], batch["positions"], tap_ids=(0, 1), attention_mask=mask
    )
    return np.concatenate([out.taps, out.hidden], -1).astype(dtype)


@pytest.mark.parametrize(
    "dtype, tolerance", [pytest.param(np.float32, 1e-6, marks=pytest.mark.slow), (np.float16, 2e-3)]
)
def test_stored_features_train_like_live_ones(case, dtype, tolerance):
    live = stage_one(case.task, BASELINE, case.drafter.params, case.frozen, case.batch, KEY, 0.0)
    batch = {**case.batch, "features": features_of(case, dtype)}
    frozen = case.frozen._replace(target=None)
    stored = stage_one(case.task, BASELINE, case.drafter.params, frozen, batch, KEY, 0.0)
    assert live[1] == stored[1] > 0
    np.testing.assert_allclose(stored[0], live[0], rtol=tolerance)


def test_the_tap_scale_can_be_folded_into_the_weights(case):
    scale = jnp.asarray(np.random.default_rng(0).uniform(0.2, 3.0, 32), jnp.float32)
    params, frozen = case.drafter.params, case.frozen._replace(tap_scale=scale)
    scaled = stage_one(case.task, BASELINE, params, frozen, case.batch, KEY, 0.0)
    folded = stage_one(
        case.task, BASELINE, conditioning.fold_tap_scale(params, scale), case.frozen, case.batch, KEY, 0.0
    )
    unscaled = stage_one(case.task, BASELINE, params, case.frozen, case.batch, KEY, 0.0)
    np.testing.assert_allclose(scaled[0], folded[0], rtol=1e-5)
    assert abs(float(scaled[0] - unscaled[0])) > 1e-2


@functools.partial(jax.jit, static_argnames=("task", "config"))
def gradients(task, config, params, frozen, batch, key):
    def loss(params, target, head):
        total, weight, _ = stage_one_loss(
            task, config, params, frozen._replace(target=target, head=head), batch, key, jnp.float32(0)
        )
        return total, weight

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, frozen.target, frozen.head)


def is_zero(tree) -> bool:
    return not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(tree))


def test_only_the_drafter_gets_gradients_and_every_parameter_of_it_does(case):
    _, (student, target, head) = gradients(case.task, BASELINE, case.drafter.params, case.frozen, case.batch, KEY)
    assert is_zero(target) and is_zero(head)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(student))


def test_rows_without_labels_add_nothing(case):
    """(a) no label, (b) prompt longer than the row, (c) answer shorter than a block, (d) one valid anchor."""
    batch = {**case.batch, "document_ids": np.ones((2, 16), np.int32), "positions": np.tile(np.arange(16), (2, 1))}
    rows = {"a": [], "b": [15], "c": [5, 6, 7], "d": [14, 15]}
    results = {}
    for pair in ("ab", "cb", "bd", "cd"):  # the same two rows of tokens, supervised here or there
        loss_mask = np.array([np.isin(np.arange(16), rows[name]) for name in pair])
        (total, weight), (student, *_) = gradients(
            case.task, BASELINE, case.drafter.params, case.frozen, {**batch, "loss_mask": loss_mask}, KEY
        )
        assert np.isfinite(total) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(student))
        results[pair] = float(total), float(weight), is_zero(student)
    assert results["ab"] == (0, 0, True)
    assert results["bd"][0] > 0 and not results["bd"][2]  # the only anchor is trained
    np.testing.assert_allclose([results[pair][1] for pair in ("cb", "bd")], [2 + np.exp(-1 / 4), 1], rtol=1e-6)
    np.testing.assert_allclose(results["cd"][:2], np.add(results["cb"][:2], results["bd"][:2]), rtol=1e-5)


def test_own_order_views_run_and_the_late_mix_takes_over(case):
    config = StageOneConfig(views=ViewMix(0, 0, 0, 1), late_views=ViewMix(), late_from=0.5)
    early, late = (
        stage_one(case.task, config, case.drafter.params, case.frozen, case.batch, KEY, p) for p in (0.49, 0.5)
    )
    assert float(early[2]["tau"][1]) < float(late[2]["tau"][1]) / 2  # something is revealed in most blocks
    assert float(late[2]["tau"][1]) == float(late[2]["blocks"][0]) > 0
    assert 0 < early[1] < late[1]


def test_revealed_slots_may_hold_the_drafters_own_tokens(case):
    """Not at the start, not in fully masked views, and never in the labels' place."""

    random = ViewMix(0, 0, 1)

    def loss(own_tokens, progress, late_views=random):
        config = StageOneConfig(views=random, late_views=late_views, own_tokens=own_tokens)
        total, weight, _ = stage_one(case.task, config, case.drafter.params, case.frozen, case.batch, KEY, progress)
        return float(total), float(weight)

    assert loss(1.0, 0.0) == loss(0.0, 0.0)
    assert loss(1.0, 0.9, ViewMix()) == loss(0.0, 0.9, ViewMix())
    swapped, plain = loss(1.0, 0.9), loss(0.0, 0.9)
    assert swapped[0] != plain[0] and swapped[1] == plain[1]  # other inputs, the same slots scored


def test_stage_one_has_no_teacher_to_learn_from():
    with pytest.raises(ValueError, match="only stage 2"):
        StageOneConfig(loss=LossConfig(rest=TermWeights(teacher_kl=1.0)))
