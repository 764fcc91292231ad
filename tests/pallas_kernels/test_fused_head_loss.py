"""The head loss: the specification against float64 formulas, the tiled version against it, and what it holds in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.fused_head_loss import HeadShares, HeadTiles, Term, fused_head_choice, fused_head_loss
from pallas_kernels.fused_head_loss.blocks import choose_tiles
from pallas_kernels.testing import chip_names, compile_for

TERMS = (
    Term("ce", 0),
    Term("ce", 1),
    Term("kl_forward", 0),
    Term("kl_reverse", 0),
    Term("kl_forward", 1),
    Term("l1", 1),
)


def make(seed, R, D, V):
    random = np.random.default_rng(seed)
    hidden, *others = random.normal(size=(3, R, D)).astype(np.float32)
    head = random.normal(size=(D, V)).astype(np.float32)
    labels = random.integers(-1, V, (2, R)).astype(np.int32)
    cotangents = random.normal(size=(len(TERMS), R)).astype(np.float32)
    return hidden, head, tuple(labels), tuple(others), cotangents


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def in_float64(hidden, head, labels, others, cotangents):
    """Values of TERMS [T, R], and the gradients of their weighed sum by hidden and head."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    log_p = log_softmax(hidden @ head)
    p, V = np.exp(log_p), head.shape[1]
    values, by_logits = [], np.zeros_like(p)
    for (kind, i), c in zip(TERMS, cotangents, strict=True):
        if kind == "ce":
            given = labels[i] >= 0
            value = np.where(given, -np.take_along_axis(log_p, np.maximum(labels[i], 0)[:, None], 1)[:, 0], 0)
            gradient = (p - np.eye(V)[labels[i]]) * given[:, None]
        else:
            log_q = log_softmax(others[i].astype(np.float64) @ head)
            q = np.exp(log_q)
            if kind == "kl_forward":
                value, gradient = (q * (log_q - log_p)).sum(-1), p - q
            elif kind == "kl_reverse":
                value = (p * (log_p - log_q)).sum(-1)
                gradient = p * (log_p - log_q - value[:, None])
            else:
                sign = np.sign(p - q)
                value, gradient = np.abs(p - q).sum(-1), p * (sign - (sign * p).sum(-1, keepdims=True))
        values.append(value)
        by_logits += c[:, None] * gradient
    return np.stack(values), by_logits @ head.T, hidden.T @ by_logits


def differentiate(hidden, head, labels, others, cotangents, **options):
    """(losses, gradients by hidden, head and others)."""

    @jax.jit
    def run(hidden, head, others):
        def total(hidden, head, others):
            losses = fused_head_loss(hidden, head, terms=TERMS, labels=labels, others=others, **options)
            return (jnp.stack(losses.values) * cotangents).sum(), losses

        return jax.grad(total, (0, 1, 2), has_aux=True)(hidden, head, others)

    gradients, losses = run(hidden, head, others)
    return losses, gradients


@pytest.mark.parametrize(
    "options, head_gradient",
    [
        ({"implementation": "reference"}, True),
        ({"block_sizes": HeadTiles(4, 8)}, False),  # rows and columns that do not divide 11 and 23
        ({"block_sizes": HeadTiles(3, 100)}, True),
        ({"block_sizes": HeadTiles(64, 5)}, True),
        ({}, False),
    ],
    ids=str,
)
def test_values_and_gradients_equal_float64(options, head_gradient):
    data = make(0, 11, 6, 23)
    values, by_hidden, by_head = in_float64(*data)
    losses, gradients = differentiate(*data, head_gradient=head_gradient, **options)
    np.testing.assert_allclose(np.stack(losses.values), values, rtol=2e-5, atol=5e-6)
    np.testing.assert_allclose(gradients[0], by_hidden, rtol=2e-4, atol=3e-5)
    np.testing.assert_allclose(gradients[1], by_head if head_gradient else 0 * by_head, rtol=2e-4, atol=3e-5)
    assert not any(np.asarray(g).any() for g in gradients[2])
    np.testing.assert_array_equal(losses.best, (data[0] @ data[1]).argmax(-1))


@settings(max_examples=5)  # each compiles
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    tiles=st.tuples(st.integers(1, 10), st.integers(1, 45)),
)
def test_any_tiling_gives_the_same(seed, rows, vocabulary, tiles):
    hidden, head, labels, others, _ = make(seed, rows, 3, vocabulary)
    arguments = {"terms": TERMS, "labels": labels, "others": others}
    expected = fused_head_loss(hidden, head, **arguments, implementation="reference")
    actual = fused_head_loss(hidden, head, **arguments, block_sizes=HeadTiles(*tiles))
    np.testing.assert_allclose(np.stack(actual.values), np.stack(expected.values), rtol=2e-5, atol=5e-6)
    np.testing.assert_array_equal(actual.best, expected.best)


def test_rows_of_weight_zero_may_hold_anything_and_weights_scale_values():
    hidden, head, labels, others, cotangents = make(2, 9, 6, 23)
    weights = np.array([0, 1, 2, 0, 0.5, 1, 1, 0, 3], np.float32)
    expected, by_hidden, _ = in_float64(hidden, head, labels, others, cotangents * weights)
    unused = weights == 0
    hidden[unused] = np.nan
    for other in others:
        other[unused] = np.nan
    losses, gradients = differentiate(
        hidden, head, labels, others, cotangents, weights=jnp.asarray(weights), block_sizes=HeadTiles(4, 8)
    )
    values = np.stack(losses.values)
    np.testing.assert_allclose(values[:, ~unused], (expected * weights)[:, ~unused], rtol=2e-5, atol=5e-6)
    np.testing.assert_allclose(gradients[0][~unused], by_hidden[~unused], rtol=2e-4, atol=3e-5)
    assert not values[:, unused].any() and not np.asarray(gradients[0])[unused].any()
    assert not any(np.asarray(g).any() for g in gradients[2])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_a_row_of_weight_zero_may_have_a_label_beyond_the_head(implementation, dtype):
    """The head's gradient adds up all rows: one NaN among them would be in each of its entries."""
    hidden, head, *_ = make(5, 3, 3, 9)
    labels, weights = np.array([0, 9, 4], dtype), np.array([1, 0, 2], np.float32)

    def value_and_gradients(rows):
        def total(hidden, head):
            losses = fused_head_loss(
                hidden, head, labels=(labels[rows],), weights=weights[rows], head_gradient=True,
                implementation=implementation,
            )  # fmt: skip
            return losses.values[0].sum()

        value, (by_hidden, by_head) = jax.value_and_grad(total, (0, 1))(hidden[rows], head)
        return value, by_hidden[jnp.asarray(weights[rows] != 0)], by_head

    for ours, without in zip(value_and_gradients([0, 1, 2]), value_and_gradients([0, 2]), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, without, rtol=1e-6, atol=1e-6)


def test_logits_far_from_zero_stay_finite():
    hidden, head, labels, others, cotangents = make(3, 5, 6, 23)
    losses, gradients = differentiate(
        hidden * 200, head, labels, tuple(o * 200 for o in others), cotangents, block_sizes=HeadTiles(2, 8)
    )
    assert np.isfinite(np.stack(losses.values)).all() and np.isfinite(gradients[0]).all()


def test_bfloat16_error_is_that_of_dense_bfloat16():
    hidden, head, labels, others, cotangents = make(4, 32, 64, 300)
    data = tuple(jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (hidden * 0.3, head * 0.3, others)))
    exact = in_float64(*(np.asarray(x, np.float64) for x in data[:2]), labels,
                       tuple(np.asarray(x, np.float64) for x in data[2]), cotangents)  # fmt: skip

    def errors(**options):
        losses, gradients = differentiate(*data[:2], labels, data[2], cotangents, **options)
        ours = np.stack(losses.values), np.asarray(gradients[0], np.float64)
        return [np.abs(a - b).max() for a, b in zip(ours, exact[:2], strict=True)]

    ours, dense = errors(block_sizes=HeadTiles(8, 64)), errors(implementation="reference")
    # Both sum float32 logits of bfloat16 inputs: values differ by float32 rounding only, so they get an absolute floor.
    assert ours[0] <= 2 * dense[0] + 1e-5 and ours[1] <= 2 * dense[1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden": jnp.zeros((5, 7))}, r"hidden.shape=\(5, 7\)"),
        ({"labels": (jnp.zeros(4, jnp.int32),)}, r"labels\[0\].shape=\(4,\) must be \(5,\)"),
        ({"labels": (jnp.zeros(5),)}, r"labels\[0\].dtype=float32"),
        ({"weights": jnp.zeros((5, 1))}, r"weights.shape=\(5, 1\)"),
        ({"terms": (Term("l1", 0),)}, r"needs others\[0\], got 0"),
        ({"terms": (Term("mse", 0),)}, "kind='mse'"),
        ({"terms": ()}, r"terms=\(\)"),
        ({"implementation": "fast"}, "implementation='fast'"),
        ({"implementation": "reference", "shares": HeadShares(("x",))}, "implementation='reference' is for whole"),
    ],
)
def test_errors_name_what_is_wrong(changes, message):
    arguments = {"hidden": jnp.zeros((5, 6)), "head": jnp.zeros((6, 9)), "labels": (jnp.zeros(5, jnp.int32),)}
    with pytest.raises(ValueError, match=message):
        fused_head_loss(**{**arguments, **changes})


def test_a_forced_pallas_does_not_fall_back_and_sizes_are_checked():
    with pytest.raises(ValueError, match="implementation='pallas' does not exist"):
        fused_head_loss(
            jnp.zeros((5, 6)), jnp.zeros((6, 9)), labels=(jnp.zeros(5, jnp.int32),), implementation="pallas"
        )
    with pytest.raises(ValueError, match="rows=0"):
        HeadTiles(0, 128)


@settings(max_examples=5)  # each compiles
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    tiles=st.tuples(st.integers(1, 10), st.integers(1, 45)),
)
def test_choices_in_any_tiling_are_those_of_whole_rows(seed, rows, vocabulary, tiles):
    hidden, head, *_ = make(seed, rows, 3, vocabulary)
    banned = np.random.default_rng(seed).random(vocabulary) < 0.5
    banned[seed % vocabulary] = False
    expected = fused_head_choice(hidden, head, banned=banned, implementation="reference")
    actual = fused_head_choice(hidden, head, banned=banned, block_sizes=HeadTiles(*tiles))
    np.testing.assert_array_equal(actual.best, expected.best)
    np.testing.assert_allclose(actual.probability, expected.probability, rtol=2e-5)
    logits = np.where(banned, -np.inf, hidden.astype(np.float64) @ head)
    np.testing.assert_array_equal(expected.best, logits.argmax(-1))
    np.testing.assert_allclose(expected.probability, np.exp(log_softmax(logits).max(-1)), rtol=2e-5)


@pytest.mark.parametrize("tiles", [(16, 40), (5, 7), (3, 40), (16, 3)], ids=str)
def test_of_equal_columns_the_first_is_best(tiles):
    random = np.random.default_rng(0)
    hidden, head = (
        random.integers(-2, 3, (16, 3)).astype(np.float32),
        random.integers(-2, 3, (3, 40)).astype(np.float32),
    )
    logits = hidden @ head  # small whole numbers: exact, and ties everywhere
    assert ((logits == logits.max(-1, keepdims=True)).sum(-1) > 1).sum() >= 8
    label = np.zeros(16, np.int32)
    losses = fused_head_loss(hidden, head, labels=(label,), block_sizes=HeadTiles(*tiles))
    choice = fused_head_choice(hidden, head, block_sizes=HeadTiles(*tiles))
    assert losses.best.tolist() == choice.best.tolist() == logits.argmax(-1).tolist()


def test_a_label_beyond_the_head_is_nan_and_so_is_its_gradient():
    hidden, head, labels, *_ = make(5, 4, 3, 9)
    label = np.array([0, 9, -1, 8], np.int32)

    def values(hidden):
        return fused_head_loss(hidden, head, labels=(label,), block_sizes=HeadTiles(3, 4)).values[0]

    assert np.isnan(values(hidden)).tolist() == [False, True, False, False]
    gradient = jax.grad(lambda h: values(h).sum())(hidden)
    assert np.isnan(gradient).all(-1).tolist() == [False, True, False, False]


def test_wrong_choices_and_shares_are_refused():
    for columns in ("fsdp", ["fsdp"], ("fsdp", "fsdp")):
        with pytest.raises(ValueError, match="must be a tuple of different mesh axes"):
            HeadShares(columns)
    rows = jnp.zeros((5, 6)), jnp.zeros((6, 9))
    with pytest.raises(ValueError, match="must be HeadShares"):
        fused_head_choice(*rows, shares=("x",))
    with pytest.raises(ValueError, match="call it inside a jax.shard_map"):
        fused_head_choice(*rows, shares=HeadShares(("x",)))
    mesh = jax.make_mesh((1,), ("x",))
    spec = jax.sharding.PartitionSpec()
    checked = jax.shard_map(
        lambda *a: fused_head_choice(*a, shares=HeadShares(("x",))).best,
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=spec,
    )
    with pytest.raises(ValueError, match="check_vma=False"):
        checked(*rows)
    with pytest.raises(ValueError, match="R, V > 0"):
        fused_head_choice(rows[0], jnp.zeros((6, 0)))
    with pytest.raises(ValueError, match=r"banned.shape=\(8,\)"):
        fused_head_choice(jnp.zeros((5, 6)), jnp.zeros((6, 9)), banned=jnp.zeros(8, bool))
    with pytest.raises(ValueError, match="rows='y' must be one of columns"):
        HeadShares(("x",), "y")


ROWS, WIDTH, VOCABULARY = 8192, 4096, 151_936


# On tpu7x the compiler retiles 16-bit arrays of loops, the whole head among them, unless it is told not to.
OPTIONS = {"tpu7x": {"compiler_options": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}}}


def compile_training(chip, terms):
    """Loss and gradient of 8192 rows under Qwen3-8B's head."""
    struct = jax.ShapeDtypeStruct
    others = 1 if any(t.kind != "ce" for t in terms) else 0

    def loss(hidden, head, label, weights, other):
        def total(hidden):
            losses = fused_head_loss(
                hidden, head, terms=terms, labels=(label,), others=(other,) * others, weights=weights
            )
            return sum(value.sum() for value in losses.values)

        return jax.value_and_grad(total)(hidden)

    hidden, head = struct((ROWS, WIDTH), jnp.bfloat16), struct((WIDTH, VOCABULARY), jnp.bfloat16)
    label, weights = struct((ROWS,), jnp.int32), struct((ROWS,), jnp.float32)
    return compile_for(chip, loss, hidden, head, label, weights, hidden, **OPTIONS.get(chip, {}))


def flops_of_tiles(products):
    """What the sweeps multiply: the last tile of the vocabulary overlaps the one before it."""
    tiles = choose_tiles(ROWS, VOCABULARY, None, "TPU v5e")
    columns = -(-VOCABULARY // tiles.columns) * tiles.columns
    return products * 2 * ROWS * WIDTH * columns


def test_compiled_for_v5e_cross_entropy_holds_no_logits_and_costs_three_products():
    compiled = compile_training("v5e", (Term("ce"),))
    assert compiled.memory_analysis().temp_size_in_bytes <= 256e6
    assert flops_of_tiles(3) <= 1.05 * 3 * 2 * ROWS * WIDTH * VOCABULARY
    # The compiler counts the body of each loop once: groups of rows x tiles of columns run.
    tiles = choose_tiles(ROWS, VOCABULARY, None, "TPU v5e")
    trips = ROWS // tiles.rows * -(-VOCABULARY // tiles.columns)
    assert compiled.cost_analysis()["flops"] * trips <= 1.05 * 3 * 2 * ROWS * WIDTH * VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("chip", chip_names())
@pytest.mark.parametrize("kind", ["ce", "kl_forward", "kl_reverse", "l1"])
def test_every_term_compiles_within_bounds(chip, kind):
    terms = (Term("ce"),) if kind == "ce" else (Term("ce"), Term(kind))
    most = 256e6 if kind == "ce" else 512e6  # another distribution has a tile of logits of its own
    assert compile_training(chip, terms).memory_analysis().temp_size_in_bytes <= most
