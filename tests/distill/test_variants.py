"""Stage 2's further terms and shorter goals, written out by hand for partly masked students, block by block in NumPy.

The cyclic curriculum makes states known: block i of a row is shown after i modulo 4 of the teacher's passes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import greedy, log_softmax, one_pass, trajectory, valid_blocks

from dstill_jax.blocks import ViewMix
from dstill_jax.distill import conditioning
from dstill_jax.distill.config import CurriculumConfig, StageOneConfig, StageTwoConfig
from dstill_jax.distill.curriculum import marks, sample_state
from dstill_jax.distill.stage_two import stage_two_loss
from dstill_jax.errors import UserError
from dstill_jax.losses.config import BlockTerms, LossConfig, TermWeights
from pallas_kernels.fused_head_loss import HeadTiles

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)
stage_two = jax.jit(stage_two_loss, static_argnames=("task", "config"))
V, K, PASSES = 37, 5, 4
SUBSET = np.sort(np.random.default_rng(7).permutation(36)[:20])
CYCLIC = CurriculumConfig("cyclic")
DATA = TermWeights(data_ce=1.0)
CONSISTENT = TermWeights(teacher_kl=0.5, consistency_kl=0.7)
CONTRAST = BlockTerms(first_error=0.5, chain=0.25, ddo_real=1.0, ddo_fake=0.5, ddo_beta=0.6)

VARIANTS = {
    "consistency with itself": StageTwoConfig(LossConfig(DATA, CONSISTENT), CYCLIC),
    "reverse consistency with the teacher": StageTwoConfig(
        LossConfig(DATA, CONSISTENT, kl_direction="reverse", consistency_with="teacher"), CYCLIC
    ),
    "block terms": StageTwoConfig(LossConfig(DATA, TermWeights(hard_ce=0.5), whole=CONTRAST), CYCLIC),
    "contrast with weights by the teacher's error, and consistency": StageTwoConfig(
        LossConfig(
            DATA,
            TermWeights(data_ce=0.5, consistency_kl=0.3),
            whole=BlockTerms(ddo_real=1.0, ddo_fake=0.25),
            teacher_slots="not_at_error",
            after_error_weight=0.3,
        ),
        CYCLIC,
    ),
    "4 passes into 2": StageTwoConfig(LossConfig(DATA, CONSISTENT), CYCLIC, student_passes=2),
}


def by_hand(case, config: StageTwoConfig, levels: dict, allowed: np.ndarray, columns: np.ndarray):
    """Loss sum and weight; `levels` holds the state shown of each block, by (row, anchor)."""
    loss = config.loss
    ends = {1: [4, 4, 4, 4], 2: [2, 2, 4, 4]}[config.student_passes]
    total = weight = 0.0

    def log_probabilities(params, tokens, a, known):
        return {j: log_softmax(row[columns]) for j, row in enumerate(one_pass(case, params, tokens, a, known))}

    def column(token):
        return int(np.flatnonzero(columns == token)[0])

    for tokens, a, scored, where in valid_blocks(case.batch, K):
        s = levels[where]
        known, log_of = trajectory(case, tokens, a, allowed)
        shown, next_shown = ({j: known[j] for j in known if j <= level} for level in (s, s + 1))
        student = log_probabilities(case.drafter.params, tokens, a, shown)
        later_model = case.drafter if loss.consistency_with == "student" else case.teacher
        later = log_probabilities(later_model.params, tokens, a, next_shown)
        stale_logits = one_pass(case, case.teacher.params, tokens, a, shown)
        first = min((j for j in scored if known[j] != tokens[a + j]), default=99)
        counted = [j for j in scored if s < j <= ends[s] and tokens[a + j] in columns]
        slots, contrasts, ce, w = {}, {"real": [], "fake": []}, {}, {}
        for j in counted:
            p, share = student[j], loss.first if j == 1 else loss.rest
            w[j] = np.exp(-(j - s - 1) / loss.gamma) * (loss.after_error_weight if j > first else 1.0)
            taught = not (loss.teacher_slots == "not_at_error" and j == first)

            def kl(q, p=p):
                if loss.kl_direction == "forward":
                    return (np.exp(q) * (q - p)).sum()
                return (np.exp(p) * (p - q)).sum()

            ce[j] = -p[column(tokens[a + j])]
            slots[j] = share.data_ce * ce[j]
            slots[j] += taught * share.hard_ce * -p[column(known[j])]
            slots[j] += taught * share.teacher_kl * kl(log_softmax(log_of[j][columns]))
            slots[j] += (j > s + 1) * share.consistency_kl * kl(later[j])
            reference = log_softmax(stale_logits[j, columns])
            for name, token, is_used in (
                ("real", known[j], taught),
                ("fake", greedy(stale_logits[j], allowed), True),
            ):
                contrasts[name] += [(w[j] * is_used, p[column(token)] - reference[column(token)])]
        mass = sum(w.values())
        total += sum(w[j] * slots[j] for j in counted)
        weight += mass
        total += mass * block_by_hand(loss.whole, contrasts, [ce[j] for j in counted])
        wrong = [j for j in counted if columns[np.argmax(student[j])] != tokens[a + j]]
        if wrong:
            total += loss.whole.first_error * w[wrong[0]] * ce[wrong[0]]
    return total, weight


def block_by_hand(terms: BlockTerms, contrasts: dict, ce: list) -> float:
    value = 0.0
    if ce:
        value += terms.chain * (1 - np.exp(-np.cumsum(ce)).mean())
    for name, factor, sign in (("real", terms.ddo_real, 1), ("fake", terms.ddo_fake, -1)):
        weights, gains = np.array(contrasts[name]).T if contrasts[name] else (np.zeros(0), np.zeros(0))
        if weights.sum() > 0:
            mean = np.average(gains, weights=weights)
            value -= factor * np.log(1 / (1 + np.exp(-sign * terms.ddo_beta * mean)))
    return value


@pytest.fixture(scope="module")
def levels(case):
    """The state shown of each valid block, by (row, anchor)."""
    anchor_key, _ = jax.random.split(KEY)
    blocks = jax.jit(lambda key: conditioning.condition(case.task, case.frozen, case.batch, key).blocks)(anchor_key)
    return {
        (b, int(blocks.anchors[b, i])): i % PASSES for b, i in np.ndindex(*blocks.valid.shape) if blocks.valid[b, i]
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_scores_as_by_hand(case, levels, name):
    config = VARIANTS[name]
    loss, weight, _ = stage_two(case.task, config, case.drafter.params, case.frozen, case.batch, KEY, 0.0)
    expected = by_hand(case, config, levels, np.arange(36), np.arange(V))
    np.testing.assert_allclose([loss, weight], expected, rtol=2e-5)
    plain = dataclasses.replace(config, student_passes=1, loss=plain_loss(config.loss))
    other = by_hand(case, plain, levels, np.arange(36), np.arange(V))
    assert abs(expected[0] - other[0]) > 1e-2  # what is new makes a difference


def plain_loss(loss: LossConfig) -> LossConfig:
    rest = dataclasses.replace(loss.rest, consistency_kl=0.0)
    return dataclasses.replace(loss, rest=rest, whole=BlockTerms(), consistency_with="student", teacher_slots="all")


def test_variants_score_as_by_hand_on_a_training_vocabulary(case, levels):
    frozen = case.frozen._replace(head=case.frozen.head[:, SUBSET], vocabulary=jnp.asarray(SUBSET))
    config = VARIANTS["contrast with weights by the teacher's error, and consistency"]
    loss, weight, _ = stage_two(case.task, config, case.drafter.params, frozen, case.batch, KEY, 0.0)
    np.testing.assert_allclose([loss, weight], by_hand(case, config, levels, SUBSET, SUBSET), rtol=2e-5)


def widest(jaxpr) -> int:
    """The most rows of an array over the vocabulary in any nested program."""
    most = 0
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            shape = getattr(v.aval, "shape", ())
            if V in shape:
                most = max(most, int(np.prod(shape)) // V)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                most = max(most, widest(inner))
    return most


EVERYTHING = StageTwoConfig(
    LossConfig(
        DATA,
        TermWeights(hard_ce=0.5, teacher_kl=0.5, consistency_kl=0.5, target_kl=0.5, target_l1=0.5),
        whole=CONTRAST,
    ),
    CYCLIC,
)


def gradients(task, config, params, frozen, batch):
    def loss(params, teacher):
        return stage_two_loss(task, config, params, frozen._replace(teacher=teacher), batch, KEY, jnp.float32(0))[0]

    return jax.value_and_grad(loss, (0, 1))(params, frozen.teacher)


def test_no_term_holds_more_logits_than_a_tile(case):
    batch = {**case.batch, "features": np.zeros((2, 16, 48), np.float16)}
    jaxprs = {
        rows: jax.make_jaxpr(lambda p, t=t: gradients(t, EVERYTHING, p, case.frozen._replace(target=None), batch))(
            case.drafter.params
        ).jaxpr
        for rows in (16, 64)
        for t in [dataclasses.replace(case.task, head_tiles=HeadTiles(rows, V))]
    }
    assert {rows: widest(jaxpr) for rows, jaxpr in jaxprs.items()} == {16: 16, 64: 64}  # of 128 rows


def test_gradients_reach_the_student_only_and_are_finite(case):
    function = jax.jit(gradients, static_argnums=(0, 1))
    _, (student, teacher) = function(case.task, EVERYTHING, case.drafter.params, case.frozen, case.batch)
    assert all(np.isfinite(leaf).all() and np.asarray(leaf).any() for leaf in jax.tree.leaves(student))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(teacher))


@pytest.mark.slow
def test_its_own_later_state_is_held_fixed(case):
    """A student compared with itself has the gradient of one compared with a frozen copy of itself."""
    function = jax.jit(gradients, static_argnums=(0, 1))
    frozen = case.frozen._replace(teacher=case.drafter.params)
    results = []
    for partner in ("student", "teacher"):
        rest = TermWeights(consistency_kl=1.0)
        config = StageTwoConfig(LossConfig(DATA, rest, consistency_with=partner), CYCLIC)
        value, (student, _) = function(case.task, config, case.drafter.params, frozen, case.batch)
        results.append((value, *jax.tree.leaves(student)))
    for own, copied in zip(*results, strict=True):
        np.testing.assert_allclose(own, copied, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "passes, student_passes, start, end",
    [
        (4, 1, [0, 0, 0, 0], [4, 4, 4, 4]),
        (4, 2, [0, 0, 2, 2], [2, 2, 4, 4]),
        (7, 4, [0, 0, 2, 2, 4, 4, 6], [2, 2, 4, 4, 6, 6, 7]),
        (2, 1, [0, 0], [2, 2]),
    ],
)
def test_marks_cut_the_teachers_passes_evenly(passes, student_passes, start, end):
    found = marks(passes, student_passes)
    assert [x.tolist() for x in found] == [start, end]


def test_a_student_of_two_passes_is_shown_both_starts_and_asked_for_one_stretch():
    commit = np.broadcast_to(np.array([0, 2, 1, 4, 3], np.int32), (1, 4000, 5))
    sample = jax.jit(sample_state, static_argnames=("config", "passes", "student_passes"))
    after = sample(CurriculumConfig(), jax.random.key(0), commit, 4, 0.9, student_passes=2)
    level, wanted = np.asarray(after.level)[0, :, 0], np.asarray(after.wanted)[0]
    assert set(level) == {0, 2} and abs((level == 0).mean() - 0.5) < 0.04
    assert (wanted[level == 0] == [False, True, True, False, False]).all()
    assert (wanted[level == 2] == [False, False, False, True, True]).all()
    before = sample(CurriculumConfig(), jax.random.key(0), commit, 4, 0.0, student_passes=2)
    counts = np.bincount(np.asarray(before.level).ravel(), minlength=4)
    assert (np.abs(counts - 1000) < 4.5 * np.sqrt(4000 * 0.25 * 0.75)).all()  # all states alike at the start


CONSISTENCY = TermWeights(consistency_kl=1.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: StageTwoConfig(student_passes=0), "StageTwoConfig.student_passes=0"),
        (
            lambda: StageTwoConfig(threshold=0.5),
            "threshold=0.5 is read by order='confidence' or 'prefix'",
        ),
        (
            lambda: StageOneConfig(views=ViewMix(), late_views=ViewMix(), own_tokens=0.5),
            "own_tokens=0.5 swaps revealed",
        ),
        (lambda: StageTwoConfig(passes=2, student_passes=2), "student_passes=2 must be below the teacher's passes=2"),
        (lambda: StageTwoConfig(LossConfig(rest=CONSISTENCY), passes=1), "consistency_kl.*passes=1"),
        (lambda: StageTwoConfig(LossConfig(first=CONSISTENCY)), "first.consistency_kl.*left_to_right.*rest"),
        (lambda: StageTwoConfig(LossConfig(first=CONSISTENCY), order="prefix"), "first.consistency_kl.*prefix.*rest"),
        (lambda: StageOneConfig(LossConfig(rest=CONSISTENCY)), "rest.consistency_kl.*StageTwoConfig"),
        (lambda: StageOneConfig(LossConfig(whole=BlockTerms(ddo_fake=0.5))), "whole.ddo_fake.*StageTwoConfig"),
        (lambda: StageOneConfig(LossConfig(after_error_weight=0.3)), "after_error_weight.*StageTwoConfig"),
    ],
)
def test_what_could_have_no_effect_is_refused_with_a_remedy(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_more_student_passes_than_a_default_teacher_has_are_refused(case):
    with pytest.raises(UserError, match="student_passes=4 must be below the teacher's passes=4"):
        stage_two_loss(
            case.task, StageTwoConfig(student_passes=4), case.drafter.params, case.frozen, case.batch, KEY, 0.0
        )


def test_first_error_and_chain_need_no_teacher():
    assert not StageOneConfig(LossConfig(whole=BlockTerms(first_error=1.0, chain=0.5))).loss.teacher_fields
