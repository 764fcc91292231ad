"""Block attention: the reference against enumeration, XLA and the simulated Pallas kernels against the reference."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_cases import SMALL, STAGED, Shape, adversarial_anchors, arrays, assert_close, run
from races import LATE, no_race

from pallas_kernels.block_attention import BlockSizes, block_attention, context_attention, visible_intervals
from pallas_kernels.block_attention.blocks import choose, tiling
from pallas_kernels.block_attention.plan import make_plan, visited_and_needed
from pallas_kernels.chips import CHIPS

F32 = 1e-5  # float32 sums in another order
ROWS = {"valid": None, "context_documents": None, "block_documents": None, "slots": None}


def enumerated(inputs: tuple, anchors, *, valid=None, documents=None, causal=False, window=None, slots=None):
    """The definition, one row at a time, in NumPy and float64."""
    q, ck, cv, bk, bv, _ = (np.asarray(x, np.float64) for x in inputs)
    (B, A, R, H, E), (G, S) = q.shape, ck.shape[1:3]
    out = np.zeros(q.shape)
    for b, a, r, h in np.ndindex(B, A, R, H):
        anchor, g = int(anchors[b][a]), h // (H // G)
        slot = r if slots is None else int(slots[b][a][r])
        if valid is not None and not valid[b][a]:
            continue
        keys, values = [], []
        for j in range(S):
            own = documents is None or documents[b][j] == documents[b][min(max(anchor, 0), S - 1)]
            if j < anchor and own and (window is None or j > anchor + slot - window):
                keys.append(ck[b, g, j])
                values.append(cv[b, g, j])
        for k in range(bk.shape[2]):
            if not (causal and k > slot) and (window is None or k > slot - window):
                keys.append(bk[b, a, k, g])
                values.append(bv[b, a, k, g])
        scores = np.stack(keys) @ q[b, a, r, h] * E**-0.5
        weights = np.exp(scores - scores.max())
        out[b, a, r, h] = weights @ np.stack(values) / weights.sum()
    return out


RULES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "causal window": {"causal": True, "window": 3},
    "documents": {"documents": [[0] * 9 + [7] * 4 + [3] * 10]},
    "dropped": {"valid": [[True, False, True, True, False]]},
    "slots": {"slots": [[[3, 1], [0, 2], [1, 1], [2, 3], [3, 0]]], "causal": True, "window": 4},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_equals_the_definition_row_by_row(rule: str, implementation: str) -> None:
    options = dict(RULES[rule])
    shape = Shape(R=2 if "slots" in options else 4, H=4, G=2, E=8, S=23)
    inputs, anchors = arrays(shape), [[0, 12, 13, 11, 22]]
    wanted = enumerated(inputs, anchors, **options)
    passed = {"context_documents" if name == "documents" else name: value for name, value in options.items()}
    passed = {name: jnp.asarray(x) if isinstance(x, list) else x for name, x in passed.items()}
    out = block_attention(*inputs[:5], jnp.asarray(anchors), implementation=implementation, **passed)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=F32)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("valid", [None, [[False, True, True, True, True]]])
def test_an_anchor_below_0_sees_no_context_whatever_its_document_is(implementation: str, valid: list | None) -> None:
    """An interval that ended before it began in front of the row would spoil which positions the other blocks see."""
    inputs, documents = arrays(Shape(E=8, S=23)), {"context_documents": jnp.zeros((1, 23), jnp.int32)}
    documents |= {"block_documents": jnp.asarray([[7, 0, 0, 0, 0]])}

    def of(first: int, implementation: str) -> dict[str, np.ndarray]:
        dropped = None if valid is None else jnp.asarray(valid)
        return run(implementation, inputs, [[first, 12, 13, 11, 22]], valid=dropped, **documents)

    assert_close(of(-5, implementation), of(0, "reference"), F32)


def test_xla_holds_no_array_of_all_queries_by_all_keys() -> None:
    shape = Shape(A=512, R=16, K=16, H=8, G=2, E=32, S=3072, dtype="bfloat16")
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(lambda: arrays(shape))[:5]]

    def loss(*x: jax.Array) -> jax.Array:
        return block_attention(*x, jnp.zeros((1, 512), jnp.int32), implementation="xla").astype(jnp.float32).sum()

    memory = jax.jit(jax.grad(loss, argnums=range(5))).lower(*structs).compile().memory_analysis()
    scores = 512 * 16 * 8 * 3072 * 4
    assert memory.temp_size_in_bytes < scores / 2, memory.temp_size_in_bytes


@pytest.fixture(scope="module")
def simulated():
    """Pallas output and gradients at one shape: compiled once, for any anchors, documents and dropped blocks."""
    shape = Shape(B=2, A=21, K=4, R=4, H=2, G=1, E=64, S=300)  # two query tiles, two chunks, three key tiles
    inputs = arrays(shape)

    def both(implementation: str):
        interpret = LATE if implementation == "pallas" else False

        @jax.jit
        def call(inputs: tuple, anchors: jax.Array, valid: jax.Array, documents: jax.Array) -> dict:
            def attend(*x: jax.Array) -> jax.Array:
                return block_attention(
                    *x, anchors, valid=valid, context_documents=documents, implementation=implementation,
                    interpret=interpret, block_sizes=STAGED,
                )  # fmt: skip

            *operands, cotangent = inputs
            out, pull = jax.vjp(attend, *operands)
            return dict(zip(("out", "dq", "dk", "dv", "dbk", "dbv"), (out, *pull(cotangent)), strict=True))

        return no_race()(call) if implementation == "pallas" else call

    return shape, inputs, both("pallas"), both("reference")


def _agree(simulated, anchors, *, valid=None, documents=None, poison=None) -> None:
    shape, inputs, pallas, reference = simulated
    valid = np.ones(anchors.shape, bool) if valid is None else valid
    documents = np.zeros((shape.B, shape.S), int) if documents is None else documents
    dirty = (
        inputs if poison is None else tuple(jnp.where(bad, jnp.nan, x) for bad, x in zip(poison, inputs, strict=True))
    )
    wanted = reference(inputs, anchors, valid, documents)
    actual = pallas(dirty, anchors, valid, documents)
    as_numpy = [{name: np.asarray(x) for name, x in results.items()} for results in (actual, wanted)]
    assert_close(*as_numpy, F32)


def test_kernels_agree_with_the_reference_for_any_anchors(simulated) -> None:
    cases = adversarial_anchors(simulated[0])
    pairs = [("random", "zero"), ("one", "last"), ("all of it", "reversed"), ("closer than K", "beyond")]
    for pair in pairs:
        _agree(simulated, np.stack([cases[name] for name in pair]))


def test_kernels_agree_with_documents_and_dropped_blocks_and_ignore_what_nobody_sees(simulated) -> None:
    shape, rng = simulated[0], np.random.default_rng(5)
    documents = np.sort(rng.integers(0, 5, (2, shape.S)), axis=1)
    anchors, valid = rng.integers(0, 280, (2, shape.A)), rng.random((2, shape.A)) < 0.7
    valid[1] = False  # a row of padding only
    options = ROWS | {"valid": jnp.asarray(valid), "context_documents": jnp.asarray(documents)}
    sees = visible_intervals(jnp.asarray(anchors), 4, 4, shape.S, causal=False, window=None, **options)
    unused = ~np.asarray(sees.context_mask(shape.S)).any(axis=(1, 2))[:, None, :, None]
    assert unused[0].any()
    dropped = ~valid[:, :, None, None, None]
    poison = (dropped, unused, unused, dropped, dropped, np.zeros_like(dropped))
    _agree(simulated, anchors, valid=valid, documents=documents, poison=poison)


def test_scores_far_out_of_reach_of_the_fixed_number_take_the_online_path(simulated) -> None:
    shape, inputs, pallas, reference = simulated
    q, ck, cv, bk, bv, do = inputs
    sharp = (q * 60, ck * 6, cv, bk, bv, do)  # scores of several hundred
    simulated = (shape, sharp, pallas, reference)
    anchors = np.random.default_rng(6).integers(0, shape.S, (2, shape.A))
    valid, documents = np.ones(anchors.shape, bool), np.zeros((2, shape.S), int)
    actual, wanted = pallas(sharp, anchors, valid, documents), reference(sharp, anchors, valid, documents)
    # Softmax is nearly one-hot: differences of 1e-4 in scores of several hundred show, relative to the largest gradient.
    as_numpy = [{name: np.asarray(x) for name, x in results.items()} for results in (actual, wanted)]
    assert_close(*as_numpy, 2e-3)


def test_context_alone_gives_output_and_logsumexp_and_the_gradients_of_both() -> None:
    shape = Shape(A=3, E=64, S=130)
    q, ck, cv, _, _, cotangent = arrays(shape)
    anchors = jnp.asarray([[0, 77, 130]])
    of_lse = jnp.asarray(np.random.default_rng(2).standard_normal(q.shape[:-1]), jnp.float32)

    def both(implementation: str, **options: object) -> dict[str, np.ndarray]:
        attend = functools.partial(context_attention, implementation=implementation, **options)
        results, pull = jax.vjp(lambda *x: attend(*x, anchors), q, ck, cv)
        return {n: np.asarray(x) for n, x in zip(names, (*results, *pull((cotangent, of_lse))), strict=True)}

    names = ("out", "lse", "dq", "dcontext_k", "dcontext_v")
    wanted = both("reference")
    for implementation, options in (("xla", {}), ("pallas", {"interpret": LATE, "block_sizes": SMALL})):
        actual = no_race()(both)(implementation, **options) if options else both(implementation)
        assert np.isneginf(actual["lse"][0, 0]).all() and (actual["out"][0, 0] == 0).all()
        np.testing.assert_allclose(actual.pop("lse"), wanted["lse"], rtol=0, atol=F32)
        assert_close(actual, {name: wanted[name] for name in actual}, F32)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("backward", [False, True])
def test_default_sizes_fit_on_every_chip_and_leave_no_empty_part_of_the_context(chip: str, backward: bool) -> None:
    element = itertools.product((64, 128, 256), (2, 4))
    rows = ((64, 16), (32, 32), (5, 32), (1, 1))  # of a block and kv head, and its slots
    for (head_dim, itemsize), (group_rows, block_size), S in itertools.product(element, rows, (1, 130, 3072, 40960)):
        shape = {"group_rows": group_rows, "block_size": block_size, "context_length": S}
        element_size = {"head_dim": head_dim, "itemsize": itemsize, "backward": backward}
        t = choose(None, chip, anchors=512, **shape, **element_size)  # raises when they do not fit
        assert (t.chunks - 1) * t.chunk < S <= t.chunks * t.chunk


@pytest.mark.parametrize("chip", CHIPS)
def test_drafting_takes_a_long_cache_in_parts(chip: str) -> None:
    """One block passes each part once, so a short text in a long cache need not read more than the first of them."""
    shape = {"anchors": 1, "group_rows": 64, "block_size": 16, "context_length": 32768}
    assert choose(None, chip, **shape, head_dim=128, itemsize=2, backward=False).chunk <= 4096


@pytest.mark.parametrize("packed", [False, True])
def test_random_anchors_visit_few_tiles_that_no_row_needs(packed: bool) -> None:
    A, K, S = 512, 16, 3072
    rng = np.random.default_rng(0)
    anchors = jnp.asarray(rng.integers(1, S, (4, A)))
    documents = jnp.asarray(np.sort(rng.integers(0, 3, (4, S)), axis=1)) if packed else None
    sees = visible_intervals(anchors, K, K, S, causal=False, window=None, **(ROWS | {"context_documents": documents}))
    t = tiling(BlockSizes(), A, 4 * K, K, S)
    visited, needed = visited_and_needed(make_plan(sees, 4, S, t), 4, t)
    assert 0 < needed <= visited <= 1.15 * needed
    unsorted_tiles = 4 * t.query_tiles * t.key_tiles
    assert visited < 0.65 * unsorted_tiles


def test_errors_name_the_argument_and_its_value() -> None:
    q, ck, cv, bk, bv, _ = arrays(Shape(H=4, G=2))
    anchors = jnp.zeros((1, 5), jnp.int32)
    with pytest.raises(ValueError, match="did you pass \\[B, S, G, E\\]"):
        block_attention(q, ck, cv.swapaxes(1, 2), bk, bv, anchors)
    with pytest.raises(ValueError, match="not a multiple of the 2 kv heads"):
        block_attention(q[:, :, :, :3], ck, cv, bk, bv, anchors)
    with pytest.raises(ValueError, match="window=0"):
        block_attention(q, ck, cv, bk, bv, anchors, window=0)
    with pytest.raises(ValueError, match="one dtype"):
        block_attention(q.astype(jnp.bfloat16), ck, cv, bk, bv, anchors)
    with pytest.raises(ValueError, match="needs a TPU"):
        block_attention(q, ck, cv, bk, bv, anchors, implementation="pallas", device_kind="cpu")
    with pytest.raises(ValueError, match="BlockSizes.keys=100"):
        BlockSizes(keys=100)
    with pytest.raises(ValueError, match="staged_bits=48 must be 16 or 32"):
        BlockSizes(staged_bits=48)
    with pytest.raises(ValueError, match="v4 offers 12.0 MiB"):
        huge = BlockSizes(context=2**20)
        wide = jax.ShapeDtypeStruct((1, 2, 2**18, 64), jnp.float32)
        blocks = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, bk, bv)]
        jax.eval_shape(
            lambda q, bk, bv, k: block_attention(
                q, k, k, bk, bv, anchors, implementation="pallas", device_kind="TPU v4", block_sizes=huge
            ),
            *blocks,
            wide,
        )


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_keys_with_their_slots_last_give_the_same_output_and_gradients(implementation: str) -> None:
    shape = Shape(A=17, H=2, G=1, E=64, S=130)  # three query tiles: both buffers are used again
    inputs, anchors = arrays(shape), adversarial_anchors(shape)["random"][None]
    wanted = run("reference", inputs, anchors)
    q, k, *rest = inputs
    actual = run(implementation, (q, k.swapaxes(2, 3), *rest), anchors, key_layout="BGEC", block_sizes=STAGED)
    actual["dcontext_k"] = actual["dcontext_k"].swapaxes(2, 3)
    assert_close(actual, wanted, F32)


def test_a_chunk_of_any_size_gives_the_same_output_and_gradients() -> None:
    shape = Shape(B=2, A=7, H=4, G=2, E=16, S=33)
    inputs, anchors = arrays(shape), np.random.default_rng(3).integers(0, 33, (2, 7))
    assert_close(run("xla", inputs, anchors, chunk=3), run("reference", inputs, anchors), F32)
    with pytest.raises(ValueError, match="chunk=0"):
        run("xla", inputs, anchors, chunk=0)
