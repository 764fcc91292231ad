"""Blocks against plain loops: anchors, slots, labels, visibility, reveal views, ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax import blocks as blocks_lib
from dstill_jax.blocks import Blocks, ViewMix
from dstill_jax.errors import UserError
from pallas_kernels.block_attention import visible_intervals

pytestmark = pytest.mark.usefixtures("quick_compilation")

K = 5


def random_rows(seed: int, rows: int = 6, width: int = 24):
    """Tokens, loss mask, document ids and positions of rows packed with documents of random lengths, and padding."""
    random = np.random.default_rng(seed)
    tokens = np.zeros((rows, width), np.int32)
    ids, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in range(rows):
        at, document = 0, 0
        while at < width and document < row:  # row 0 is all padding
            document += 1
            n = min(int(random.integers(1, 12)), width - at)
            ids[row, at : at + n], positions[row, at : at + n] = document, np.arange(n)
            tokens[row, at : at + n] = random.integers(1, 100, n)
            at += n
    loss_mask = (random.random((rows, width)) < 0.75) & (ids > 0)
    return tokens, loss_mask, ids, positions


@pytest.fixture(scope="module")
def cut():
    return jax.jit(blocks_lib.cut_blocks, static_argnames="block_size")


sample_views = jax.jit(blocks_lib.sample_views)
sample_anchors = jax.jit(blocks_lib.sample_anchors, static_argnames="anchors_per_row")


def test_label_of_slot_j_is_the_token_at_a_plus_j(cut):
    S = 12
    row = np.arange(S, dtype=np.int32)[None]
    ones = np.ones((1, S), np.int32)
    anchors = np.array([[0, 3, 7, 11]], np.int32)
    blocks = cut(row, ones.astype(bool), ones, row, anchors, np.ones((1, 4), bool), K)
    for i, a in enumerate(anchors[0]):
        for j in range(K):
            assert blocks.positions[0, i, j] == a + j
            assert bool(blocks.scored[0, i, j]) == (0 < j and a + j < S)
            if a + j < S:
                assert blocks.tokens[0, i, j] == a + j


@pytest.mark.parametrize("seed", range(3))
def test_blocks_equal_a_plain_loop_on_packed_rows(cut, seed):
    tokens, loss_mask, ids, positions = random_rows(seed)
    rows, S = tokens.shape
    random = np.random.default_rng(seed + 10)
    anchors = random.integers(0, S, (rows, 7)).astype(np.int32)  # unsorted, with duplicates, valid or not
    valid = random.random((rows, 7)) < 0.8
    blocks = cut(tokens, loss_mask, ids, positions, anchors, valid, K)
    rules = {"valid": jnp.asarray(valid), "context_documents": jnp.asarray(ids), "block_documents": None}
    sees = visible_intervals(jnp.asarray(anchors), 1, K, S, **rules, slots=None, causal=False, window=None)
    visible = np.asarray(sees.context_mask(S))[:, :, 0]
    for b in range(rows):
        for i, a in enumerate(anchors[b]):
            for j in range(K):
                exists = a + j < S and ids[b, a + j] == ids[b, a]
                scored = valid[b, i] and j > 0 and exists and loss_mask[b, a + j]
                assert bool(blocks.scored[b, i, j]) == scored
                assert blocks.positions[b, i, j] == positions[b, a] + j
                if a + j < S:
                    assert blocks.tokens[b, i, j] == tokens[b, a + j]
            for s in range(S):
                assert visible[b, i, s] == (valid[b, i] and s < a and ids[b, s] == ids[b, a])


@pytest.mark.parametrize("seed", range(3))
def test_a_valid_anchor_is_supervised_at_a_and_a_plus_1_of_one_document(seed):
    _, loss_mask, ids, _ = random_rows(seed)
    valid = np.asarray(blocks_lib.valid_anchors(jnp.asarray(loss_mask), jnp.asarray(ids)))
    for b in range(ids.shape[0]):
        for a in range(ids.shape[1]):
            inside = a + 1 < ids.shape[1]
            assert valid[b, a] == bool(
                inside and loss_mask[b, a] and loss_mask[b, a + 1] and ids[b, a] == ids[b, a + 1]
            )


def test_last_answer_token_before_another_document_is_no_anchor():
    loss_mask, ids = np.ones((1, 6), bool), np.array([[1, 1, 1, 2, 2, 2]], np.int32)
    assert np.asarray(blocks_lib.valid_anchors(loss_mask, ids))[0].tolist() == [True, True, False, True, True, False]


@pytest.mark.parametrize("count", [1, 3, 10, 24, 99])
def test_sampled_anchors_are_distinct_and_valid_and_none_is_forgotten(count):
    tokens, loss_mask, ids, _ = random_rows(1)
    candidates = np.asarray(blocks_lib.valid_anchors(loss_mask, ids))
    anchors, valid = map(np.asarray, sample_anchors(jax.random.key(0), loss_mask, ids, count))
    for b in range(tokens.shape[0]):
        chosen = anchors[b][valid[b]]
        assert len(set(chosen)) == len(chosen) == min(count, candidates[b].sum())
        assert candidates[b][chosen].all()


def test_the_only_valid_anchor_of_a_row_is_always_taken():
    loss_mask = np.zeros((1, 16), bool)
    loss_mask[0, 14:] = True
    ids = np.ones((1, 16), np.int32)
    for seed in range(5):
        anchors, valid = sample_anchors(jax.random.key(seed), loss_mask, ids, 4)
        assert np.asarray(anchors)[np.asarray(valid)].tolist() == [14]


def test_anchors_are_uniform_over_the_valid_ones():
    loss_mask = np.ones((4000, 9), bool)
    loss_mask[:, 3] = False
    anchors, valid = sample_anchors(jax.random.key(5), loss_mask, np.ones((4000, 9), np.int32), 2)
    assert bool(valid.all())
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=9)
    possible = [0, 1, 4, 5, 6, 7]
    assert counts.sum() == counts[possible].sum() == 8000
    expected = 8000 / 6
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 20.5  # chi-square, 5 degrees of freedom, p = 0.001


def all_scored(number: int, slots: int) -> Blocks:
    shape = (1, number, slots)
    scored = np.broadcast_to(np.arange(slots) > 0, shape)
    anchors = np.zeros((1, number), np.int32)
    return Blocks(anchors, anchors == 0, np.ones(shape, np.int32), scored, np.zeros(shape, np.int32))


def views_of(mix: ViewMix, slots: int, number: int = 20000, seed: int = 0, confidence=None) -> np.ndarray:
    views = sample_views(
        jax.random.key(seed), np.float32(mix.shares), mix.prefix_decay, all_scored(number, slots), confidence
    )
    return np.asarray(views)[0]


def assert_frequencies(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Within 4.5 standard deviations of a binomial count, outcome by outcome."""
    total = counts.sum()
    probabilities = np.asarray(probabilities)
    deviation = np.sqrt(total * probabilities * (1 - probabilities)) + 1e-9
    assert (np.abs(counts - total * probabilities) <= 4.5 * deviation).all(), (counts, total * probabilities)


@pytest.mark.parametrize("decay", [0.9, 0.5, 1.0])
def test_prefix_view_reveals_a_prefix_of_decaying_length(decay):
    slots = 6
    views = views_of(ViewMix(0, 1, 0, 0, decay), slots)
    lengths = views[:, 1:].sum(1)
    assert (views == (np.arange(slots) <= lengths[:, None])).all()
    possible = decay ** np.arange(1, slots - 1)
    assert_frequencies(np.bincount(lengths, minlength=slots), [0, *(possible / possible.sum()), 0])


def test_random_view_reveals_every_number_of_slots_equally_often():
    slots = 6  # r ~ U(0, 1) makes the number of successes in K - 1 trials uniform over 0 .. K - 1
    views = views_of(ViewMix(0, 0, 1), slots)
    assert_frequencies(np.bincount(views[:, 1:].sum(1), minlength=slots), np.full(slots, 1 / slots))
    assert_frequencies(views[:, 1:].sum(0), np.full(slots - 1, 1 / (slots - 1)))


def test_own_order_view_reveals_the_surest_slots():
    slots = 6
    confidence = np.random.default_rng(0).random((1, 20000, slots)).astype(np.float32)
    confidence[..., 0] = 2.0  # the anchor is no candidate, whatever is said of it
    views = views_of(ViewMix(0, 0, 0, 1), slots, confidence=confidence)
    number = views[:, 1:].sum(1)
    for view, sure, n in zip(views[:500], confidence[0, :500], number[:500], strict=True):
        assert set(np.flatnonzero(view[1:]) + 1) == set(np.argsort(-sure[1:])[:n] + 1)
    # Each number of revealed slots is as likely as any other, and one slot is always left to predict.
    assert_frequencies(np.bincount(number, minlength=slots), [0, *[1 / (slots - 2)] * (slots - 2), 0])


def test_views_are_mixed_in_their_shares():
    slots = 6
    views = views_of(ViewMix(0.5, 0.25, 0.25), slots)
    number = views[:, 1:].sum(1)
    is_prefix = (views == (np.arange(slots) <= number[:, None])).all(1)
    share_random_none, share_random_prefix = 1 / slots, sum(1 / slots / _choose(slots - 1, n) for n in range(1, slots))
    assert_frequencies(
        np.array([(number == 0).sum(), (is_prefix & (number > 0)).sum(), (~is_prefix).sum()]),
        [
            0.5 + 0.25 * share_random_none,
            0.25 + 0.25 * share_random_prefix,
            0.25 * (1 - share_random_none - share_random_prefix),
        ],
    )


def _choose(n: int, k: int) -> float:
    return float(np.prod([(n - i) / (i + 1) for i in range(k)]))


@pytest.mark.parametrize("mix", [ViewMix(), ViewMix(0, 1), ViewMix(0, 0, 1), ViewMix(0, 0, 0, 1)])
def test_the_anchor_is_always_revealed_and_slots_without_a_label_never(mix):
    blocks = all_scored(20000, 6)
    scored = np.asarray(blocks.scored) & (np.random.default_rng(0).random(blocks.scored.shape) < 0.5)
    views = sample_views(
        jax.random.key(0),
        np.float32(mix.shares),
        mix.prefix_decay,
        blocks._replace(scored=scored),
        np.random.default_rng(1).random(scored.shape).astype(np.float32),
    )
    views = np.asarray(views)
    assert views[..., 0].all()
    assert not (views[..., 1:] & ~scored[..., 1:]).any()
    assert (views[..., 1:].any()) == (mix.full == 0)
    tokens = blocks_lib.mask_tokens(np.full(scored.shape, 3), views, 9)
    assert (np.asarray(tokens) == np.where(views, 3, 9)).all()


def test_a_block_of_two_slots_has_nothing_to_reveal_as_a_prefix():
    assert not views_of(ViewMix(0, 1), 2, 100)[:, 1].any()


def test_masked_rank_and_accepted_prefix_equal_loops():
    random = np.random.default_rng(0)
    revealed, correct, scored = random.random((3, 50, 7)) < 0.5
    rank = np.asarray(blocks_lib.masked_rank(jnp.asarray(revealed)[None]))[0]
    accepted = np.asarray(blocks_lib.accepted_prefix(jnp.asarray(correct), jnp.asarray(scored)))
    for i in range(50):
        for j in range(7):
            assert rank[i, j] == (~revealed[i, :j]).sum()
        n = 0
        while n + 1 < 7 and correct[i, n + 1] and scored[i, n + 1]:
            n += 1
        assert accepted[i] == n  # a hole in the labels ends the prefix


@pytest.mark.parametrize(
    "shares, message",
    [((0.5, 0.4), "sum to 1"), ((1.5, -0.5), "non-negative"), ((1, 0, 0, 0, 0.0), "prefix_decay=0.0")],
)
def test_bad_view_mixes_are_refused(shares, message):
    with pytest.raises(UserError, match=message):
        ViewMix(*shares)
