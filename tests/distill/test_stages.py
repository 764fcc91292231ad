"""Both stages against distillation written out by hand, block by block, in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import log_softmax, one_pass, trajectory, valid_blocks

from dstill_jax.distill import conditioning
from dstill_jax.distill.config import CurriculumConfig, StageTwoConfig, dflash_baseline
from dstill_jax.distill.stage_one import stage_one_loss
from dstill_jax.distill.stage_two import stage_two_loss
from dstill_jax.distill.trajectories import teacher_trajectory
from dstill_jax.losses.config import LossConfig, TermWeights

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)
stage_one = jax.jit(stage_one_loss, static_argnames=("task", "config"))
stage_two = jax.jit(stage_two_loss, static_argnames=("task", "config"))
V, GAMMA = 37, 4.0
SUBSET = np.sort(np.random.default_rng(7).permutation(36)[:20])  # a training vocabulary


@pytest.fixture(scope="module")
def vocabularies(case):
    """Frozen arrays for the whole vocabulary and for a subset, and the token ids that may be drafted."""
    subset = case.frozen._replace(head=case.frozen.head[:, SUBSET], vocabulary=jnp.asarray(SUBSET))
    return {"whole": (case.frozen, np.arange(36), np.arange(V)), "subset": (subset, SUBSET, SUBSET)}


def test_stage_one_with_full_views_is_the_dflash_cross_entropy(case):
    total = weight = accepted = right = count = 0.0
    for tokens, a, scored, _ in valid_blocks(case.batch, 5):
        logits = one_pass(case, case.drafter.params, tokens, a, {})
        log_p = log_softmax(logits)
        prefix = True
        count += 1
        for j in range(1, 5):
            if j in scored:
                w = np.exp(-(j - 1) / GAMMA)
                total -= w * log_p[j, tokens[a + j]]
                weight += w
                right += j == 1 and logits[j].argmax() == tokens[a + j]
            prefix = prefix and j in scored and logits[j].argmax() == tokens[a + j]
            accepted += prefix
    loss, ours, metrics = stage_one(
        case.task, dflash_baseline(), case.drafter.params, case.frozen, case.batch, KEY, 0.0
    )
    np.testing.assert_allclose([loss, ours], [total, weight], rtol=1e-5)
    assert [float(x) for x in metrics["tau"]] == [count + accepted, count]
    assert float(metrics["slot1"][0]) == right
    assert float(metrics["blocks"][0]) == count


def by_hand(case, config: LossConfig, allowed: np.ndarray, columns: np.ndarray, helped: bool) -> tuple[float, float]:
    """Loss sum and weight of stage 2 with fully masked students; distributions are over `columns`.

    A random teacher is hardly ever right; a helped one is said to be at two positions of three, so that its first
    error falls on any slot.
    """
    total = weight = 0.0
    for tokens, a, scored, (_, anchor) in valid_blocks(case.batch, 5):
        known, log_of = trajectory(case, tokens, a, allowed)
        logits = one_pass(case, case.drafter.params, tokens, a, {})
        if helped:
            known = {j: tokens[a + j] if j in scored and (anchor + j) % 3 else known[j] for j in known}
        errors = [j for j in scored if known[j] != tokens[a + j]]
        first = min(errors, default=99)
        for j in scored:
            if tokens[a + j] not in columns:
                continue
            log_p = log_softmax(logits[j, columns])
            log_t = log_softmax(log_of[j][columns])
            terms = {
                "data_ce": -log_p[np.flatnonzero(columns == tokens[a + j])[0]],
                "hard_ce": -log_p[np.flatnonzero(columns == known[j])[0]],
                "teacher_kl": (np.exp(log_t) * (log_t - log_p)).sum(),
            }
            if config.kl_direction == "reverse":
                terms["teacher_kl"] = (np.exp(log_p) * (log_p - log_t)).sum()
            use_data = config.data_slots == "all" or j <= first
            use_teacher = {"all": True, "not_at_error": j != first, "after_error": j > first}[config.teacher_slots]
            share = config.first if j == 1 else config.rest
            value = share.data_ce * terms["data_ce"] * use_data
            value += (share.hard_ce * terms["hard_ce"] + share.teacher_kl * terms["teacher_kl"]) * use_teacher
            w = np.exp(-(j - 1) / config.gamma) * (config.after_error_weight if j > first else 1.0)
            total += w * value
            weight += w
    return total, weight


def same(**terms) -> dict:
    return {"first": TermWeights(**terms), "rest": TermWeights(**terms)}


MIXES = {
    "slot-wise": LossConfig(TermWeights(data_ce=1.0), TermWeights(teacher_kl=1.0)),
    "hard": LossConfig(**same(hard_ce=1.0)),
    "soft": LossConfig(**same(teacher_kl=1.0)),
    "reverse": LossConfig(**same(teacher_kl=1.0), kl_direction="reverse"),
    "mix": LossConfig(**same(teacher_kl=0.5, hard_ce=0.25, data_ce=0.25), teacher_slots="not_at_error"),
    "data until the error, teacher after it": LossConfig(
        **same(data_ce=1.0, teacher_kl=1.0), data_slots="until_error", teacher_slots="after_error"
    ),
    "less after the error": LossConfig(**same(teacher_kl=1.0, data_ce=0.5), after_error_weight=0.3, gamma=2.0),
}


@pytest.fixture(scope="module")
def scored_passes(case, vocabularies):
    """Teacher's completions and the student's fully masked pass, once; each mix then only scores them."""

    def build(frozen):
        data = conditioning.condition(case.task, frozen, case.batch, KEY)
        context = conditioning.project(case.task, frozen.teacher, data)
        teacher = teacher_trajectory(case.task, frozen, frozen.teacher, data, context, 4, "left_to_right", 0.9)
        masked = np.arange(5) == 0
        tokens = jnp.where(masked, data.blocks.tokens, case.task.drafter.mask_token_id)
        params = case.drafter.params
        hidden = conditioning.run_pass(
            case.task, frozen, params, data, conditioning.project(case.task, params, data), tokens
        )
        return data, teacher, hidden

    return {name: jax.jit(build)(frozen) for name, (frozen, *_) in vocabularies.items()}


@pytest.mark.parametrize("name", ["whole", "subset"])
def test_the_teacher_completes_blocks_one_slot_at_a_time(case, vocabularies, scored_passes, name):
    frozen, allowed, _ = vocabularies[name]
    data, teacher, _ = scored_passes[name]
    place = {(b, int(a)): (b, i) for b in (0, 1) for i, a in enumerate(data.blocks.anchors[b])}
    for tokens, a, _, where in valid_blocks(case.batch, 5):
        known, _ = trajectory(case, tokens, a, allowed)
        assert teacher.tokens[place[where]].tolist() == [tokens[a], *known.values()]
        assert teacher.commit_pass[place[where]].tolist() == [0, 1, 2, 3, 4]
    drafted = np.asarray(teacher.tokens)[np.asarray(data.blocks.valid)][:, 1:]
    assert set(drafted.ravel()) <= set(allowed)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", ["whole", "subset"])
def test_stage_two_scores_as_by_hand(case, vocabularies, scored_passes, name, mix):
    frozen, allowed, columns = vocabularies[name]
    data, teacher, hidden = scored_passes[name]
    at = data.blocks.anchors[..., None] + jnp.arange(5)
    helped = jnp.where(data.blocks.scored & (at % 3 > 0), data.blocks.tokens, teacher.tokens)
    revealed = jnp.broadcast_to(jnp.arange(5) == 0, teacher.tokens.shape)
    view = conditioning.TeacherView(helped, teacher.hidden)
    loss, weight, _ = conditioning.score(case.task, frozen, MIXES[mix], data, hidden, revealed, jnp.float32(0), view)
    np.testing.assert_allclose([loss, weight], by_hand(case, MIXES[mix], allowed, columns, True), rtol=2e-5)


def test_the_whole_of_stage_two_is_its_parts(case, vocabularies):
    frozen, allowed, columns = vocabularies["subset"]
    config = StageTwoConfig(loss=MIXES["mix"], curriculum=CurriculumConfig("full"))
    loss, weight, metrics = stage_two(case.task, config, case.drafter.params, frozen, case.batch, KEY, 0.0)
    np.testing.assert_allclose([loss, weight], by_hand(case, config.loss, allowed, columns, False), rtol=2e-5)
    assert float(metrics["masked_share"][0]) == float(metrics["masked_share"][1])
    accepted = 0
    for tokens, a, scored, _ in valid_blocks(case.batch, 5):
        known, _ = trajectory(case, tokens, a, allowed)
        j = 1
        while j in scored and known[j] == tokens[a + j]:
            j += 1
        accepted += j
    assert float(metrics["teacher_tau"][0]) == accepted


def loss_gradient(case, frozen, config, progress):
    def loss(params, teacher):
        return stage_two_loss(
            case.task, config, params, frozen._replace(teacher=teacher), case.batch, KEY, jnp.float32(progress)
        )[0]

    return jax.jit(jax.grad(loss, (0, 1)))(case.drafter.params, frozen.teacher)


@pytest.mark.slow
def test_the_teacher_gets_no_gradient(case):
    student, teacher = loss_gradient(case, case.frozen, StageTwoConfig(), 0.0)
    assert all(np.isfinite(leaf).all() and np.asarray(leaf).any() for leaf in jax.tree.leaves(student))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(teacher))


def products(jaxpr, shape, in_loop=False):
    """(inside a loop?) of every matrix product with an operand of this shape, in all nested programs."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and any(v.aval.shape == shape for v in eqn.invars):
            found.append(in_loop)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += products(inner, shape, in_loop or eqn.primitive.name in ("scan", "while"))
    return found


@pytest.mark.parametrize("order", ["left_to_right", "quota"])
def test_context_is_projected_once_for_all_passes(case, order):
    config = StageTwoConfig(order=order)
    batch = {**case.batch, "features": np.zeros((2, 16, 48), np.float16)}  # no target in the program
    task = dataclasses.replace(case.task, anchors_per_row=15)  # 30 rows of outputs: a shape that nothing else has
    jaxpr = jax.make_jaxpr(lambda p: stage_two_loss(task, config, p, case.frozen, batch, KEY, 0.0)[0])(
        case.drafter.params
    ).jaxpr
    # W_fc [T*D, D], and c [B*S, D] with W_k and with W_v: once for the teacher, once for the student.
    assert products(jaxpr, (32, 16)) == [False] * 6
    assert products(jaxpr, (20, 16)).count(True) == 1  # the draft layer's MLP: in the teacher's loop, and
    assert products(jaxpr, (20, 16)).count(False) == 1  # once for the student


def test_columns_and_token_ids_map_onto_each_other(vocabularies):
    frozen, *_ = vocabularies["subset"]
    columns = np.asarray(conditioning.to_columns(frozen, jnp.arange(V)))
    assert columns.tolist() == [SUBSET.tolist().index(t) if t in SUBSET else -1 for t in range(V)]
    assert np.asarray(conditioning.to_columns(frozen._replace(vocabulary=None), jnp.arange(V))).tolist() == list(
        range(V)
    )


@pytest.mark.parametrize("kept", [None, [1, 5, 9, 36], [1, 5, 9]], ids=["whole", "with the mask", "without it"])
def test_the_mask_token_is_never_drafted_by_a_teacher(case, kept):
    """Even when the teacher would rather say nothing else."""
    mask = case.drafter.config.mask_token_id
    assert mask == 36
    frozen = case.frozen
    if kept is not None:
        frozen = frozen._replace(head=frozen.head[:, np.array(kept)], vocabulary=jnp.asarray(kept))
    wanted = jnp.asarray(case.frozen.head[:, mask])  # as close to the mask token's row as can be
    tokens, sure = conditioning.pick(case.task, frozen, jnp.stack([wanted, -wanted])[None, None])
    logits = np.stack([wanted, -wanted]) @ np.asarray(case.frozen.head)
    allowed = np.setdiff1d(np.arange(V) if kept is None else kept, [mask])
    assert tokens[0, 0].tolist() == allowed[np.argmax(logits[:, allowed], axis=-1)].tolist()
    assert ((np.asarray(sure) > 0) & (np.asarray(sure) <= 1)).all()


@pytest.mark.parametrize("changes", [{"passes": 0}, {"order": "random"}])
def test_bad_stage_two_configs_are_refused(changes):
    with pytest.raises(ValueError, match="|".join(f"{k}={v!r}" for k, v in changes.items())):
        dataclasses.replace(StageTwoConfig(), **changes)
