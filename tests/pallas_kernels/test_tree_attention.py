"""Tree attention: the specification against enumeration in NumPy, then every implementation against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from races import EAGER, no_race

from pallas_kernels.chips import CHIPS
from pallas_kernels.merge import merge_attention
from pallas_kernels.testing import chip_names, compile_for
from pallas_kernels.tree_attention import (
    TreeBlocks,
    ancestor_words,
    block_words,
    chain_parents,
    tree_attention,
    tree_attention_reference,
    unpack_words,
)
from pallas_kernels.tree_attention.blocks import TreeShape, choose_blocks
from pallas_kernels.tree_attention.steps import TILE_BITS, list_steps

simulated = functools.partial(no_race()(tree_attention), implementation="pallas", interpret=EAGER)


def random_parents(random, batch, rows):
    """Trees and forests whose rows are in any order."""
    parents = np.full((batch, rows), -1, np.int32)
    for b in range(batch):
        order = random.permutation(rows)
        for i in range(1, rows):
            if random.random() < 0.85:
                parents[b, order[i]] = order[random.integers(i)]
    return parents


def make(seed, B, N, H, G, E, C, lengths, dtype=np.float32, key_layout="BGEC"):
    """Arguments of tree_attention; unused slots of the cache and invalid rows of the tree hold NaN."""
    random = np.random.default_rng(seed)
    q = random.normal(size=(B, N, H, E))
    k, v = random.normal(size=(2, B, G, C, E))
    tree_k, tree_v = random.normal(size=(2, B, N, G, E))
    parents = random_parents(random, B, N)
    valid = np.ones((B, N), bool)
    if N > 2:
        childless = [n for n in range(N) if n not in parents[0]]
        valid[0, childless[0]] = False
    for b in range(B):
        k[b, :, lengths[b] :] = v[b, :, lengths[b] :] = np.nan
        tree_k[b, ~valid[b]] = tree_v[b, ~valid[b]] = np.nan
    if key_layout == "BGEC":
        k = k.swapaxes(2, 3)
    words = jax.jit(ancestor_words)(parents, valid)
    arrays = (jnp.asarray(x, dtype) for x in (q, k, v))
    return *arrays, jnp.asarray(lengths, jnp.int32), jnp.asarray(tree_k, dtype), jnp.asarray(tree_v, dtype), words


def by_enumeration(q, k, v, lengths, tree_k, tree_v, parents):
    """Float64, one row and head at a time, ancestors by walking; keys [B, G, C, E]."""
    B, N, H, E = q.shape
    G = k.shape[1]
    out = np.zeros(q.shape)
    for b, n, h in np.ndindex(B, N, H):
        g, path, row = h // (H // G), [], n
        while row >= 0:
            path.append(row)
            row = parents[b, row]
        keys = np.concatenate([k[b, g, : lengths[b]], tree_k[b, path, g]]).astype(np.float64)
        values = np.concatenate([v[b, g, : lengths[b]], tree_v[b, path, g]]).astype(np.float64)
        scores = keys @ q[b, n, h].astype(np.float64) / E**0.5
        weights = np.exp(scores - scores.max())
        out[b, n, h] = weights @ values / weights.sum()
    return out


def test_the_reference_is_attention_along_each_rows_path():
    random = np.random.default_rng(0)
    q = random.normal(size=(2, 7, 4, 8)).astype(np.float32)
    k, v = random.normal(size=(2, 2, 2, 10, 8)).astype(np.float32)
    tree_k, tree_v = random.normal(size=(2, 2, 7, 2, 8)).astype(np.float32)
    lengths, parents = np.array([4, 10]), random_parents(random, 2, 7)
    words = ancestor_words(jnp.asarray(parents))
    out, _ = tree_attention_reference(q, k, v, lengths, tree_k, tree_v, words, key_layout="BGCE")
    np.testing.assert_allclose(out, by_enumeration(q, k, v, lengths, tree_k, tree_v, parents), rtol=1e-5, atol=1e-6)


@given(st.integers(0, 1000), st.sampled_from([1, 33, 300]))
def test_ancestor_words_name_the_path_to_the_root(seed, rows):
    random = np.random.default_rng(seed)
    parents, valid = random_parents(random, 1, rows), random.random((1, rows)) < 0.9
    seen = np.zeros((1, rows, rows), bool)
    for n in range(rows):
        row = n
        while row >= 0:
            seen[0, n, row] = valid[0, n] and valid[0, row]
            row = parents[0, row]
    words = jax.jit(ancestor_words)(parents, valid)
    np.testing.assert_array_equal(unpack_words(words), seen)


def test_a_chain_of_1024_is_causal_and_a_block_sees_itself_whole():
    chain = unpack_words(ancestor_words(chain_parents(1, 1024)))[0]
    np.testing.assert_array_equal(chain, np.tril(np.ones((1024, 1024), bool)))
    assert bool(unpack_words(block_words(1024)).all()) and bool(unpack_words(block_words(7)).all())


def test_several_chains_over_one_context_are_as_many_runs_of_one_chain():
    """The D2SD form: all chains grow from the last committed token, row 0."""
    chains, length = 3, 4
    q, k, v, lengths, tree_k, tree_v, _ = make(3, 2, 1 + chains * length, 4, 2, 16, 40, [40, 13])
    tree_k, tree_v = jnp.nan_to_num(tree_k), jnp.nan_to_num(tree_v)
    words = ancestor_words(chain_parents(chains, length, shared_root=True))
    together = tree_attention(q, k, v, lengths, tree_k, tree_v, words, implementation="xla")
    for c in range(chains):
        rows = np.r_[0, 1 + c * length : 1 + (c + 1) * length]
        alone = tree_attention(
            q[:, rows],
            k,
            v,
            lengths,
            tree_k[:, rows],
            tree_v[:, rows],
            ancestor_words(chain_parents(1, 1 + length)),
            implementation="reference",
        )
        np.testing.assert_allclose(together[:, rows], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rows, heads, capacity, chunk, layout",
    [
        (1, (1, 1), 1, None, "BGEC"),
        (3, (4, 2), 129, 64, "BGEC"),
        (16, (4, 2), 7, 5, "BGCE"),
        (16, (2, 2), 129, None, "BGEC"),
    ],
)
def test_xla_equals_the_reference(rows, heads, capacity, chunk, layout):
    run = functools.partial(tree_attention, key_layout=layout, with_lse=True)
    ours = jax.jit(functools.partial(run, implementation="xla", chunk=chunk))
    reference = jax.jit(functools.partial(run, implementation="reference"))

    @given(seed=st.integers(0, 99))
    def check(seed):
        lengths = np.random.default_rng(seed).integers(0, capacity + 1, 2)
        arguments = make(seed, 2, rows, *heads, 8, capacity, lengths, key_layout=layout)
        for actual, expected in zip(ours(*arguments), reference(*arguments), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
            assert not np.isnan(actual).any()

    check()


CASES = {
    "several tiles, empty first row": (3, 6, 2, 1, 32, 300, [0, 300, 130], TreeBlocks(256, 32, 32, 128), "BGEC"),
    "keys laid out like values": (1, 6, 2, 2, 32, 200, [129], TreeBlocks(128, 16, 16, 128), "BGCE"),
    "rows in parts, head size 80": (1, 40, 2, 1, 80, 129, [129], TreeBlocks(256, 48, 16, 256), "BGEC"),
    "more than 128 rows": (1, 130, 1, 1, 8, 64, [33], TreeBlocks(128, 256, 128, 128), "BGEC"),
    "nothing but the tree": (2, 1, 8, 1, 16, 1, [0, 0], None, "BGEC"),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_the_reference(case):
    *shape, lengths, blocks, layout = CASES[case]
    arguments = make(5, *shape, lengths, key_layout=layout)
    expected = tree_attention(*arguments, key_layout=layout, with_lse=True, implementation="reference")
    actual = simulated(*arguments, key_layout=layout, with_lse=True, block_sizes=blocks)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    assert np.isfinite(actual[0]).all()


def test_a_layer_of_a_stacked_cache_is_rows_of_it():
    """Three layers, each of two sequences: the middle one is read, the others hold NaN and do not matter."""
    q, k, v, *rest = make(9, 2, 5, 2, 1, 16, 150, [140, 0])
    expected = tree_attention_reference(q, k, v, *rest)[0]
    k, v = (jnp.concatenate([jnp.full_like(x, jnp.nan), x, jnp.full_like(x, jnp.nan)]) for x in (k, v))
    for attend in (simulated, functools.partial(tree_attention, implementation="xla")):
        out = attend(q, k, v, *rest, first_row=jnp.int32(2))
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_the_kernel_gives_one_half_of_a_cascade():
    """Context alone, merged with the block's own part, is attention over both; an empty row has weight 0."""
    q, k, v, lengths, tree_k, tree_v, words = make(7, 2, 4, 1, 1, 16, 100, [0, 77])
    context = simulated(q, k, v, lengths, with_lse=True, block_sizes=TreeBlocks(128, 16, 16, 128))
    assert np.isneginf(context[1][0]).all()
    own = tree_attention_reference(q, k, v, jnp.zeros(2, jnp.int32), tree_k, tree_v, words)
    expected = tree_attention_reference(q, k, v, lengths, tree_k, tree_v, words)
    for ours, theirs in zip(merge_attention(*context, *own), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("attend", [simulated, functools.partial(tree_attention, implementation="xla")])
def test_bfloat16_error_is_that_of_dense_bfloat16(attend):
    arguments = make(9, 1, 8, 4, 1, 64, 256, [200], jnp.bfloat16)
    exact = tree_attention_reference(*(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arguments))[0]
    q, k, v, lengths, tree_k, tree_v, words = arguments
    k = jnp.concatenate([k[..., :200], tree_k.transpose(0, 2, 3, 1)], axis=3)
    v = jnp.concatenate([v[:, :, :200], tree_v.swapaxes(1, 2)], axis=2)
    mask = jnp.pad(unpack_words(words), ((0, 0), (0, 0), (200, 0)), constant_values=True)
    used = mask.any(1)[:, None, :, None]
    scores = jnp.einsum("bnhe,bgec->bhnc", q, k, preferred_element_type=jnp.float32) / 8
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1).astype(jnp.bfloat16)
    dense = jnp.einsum("bhnc,bgce->bnhe", weights, jnp.where(used, v, 0))
    ours = attend(*arguments)

    def error(x):
        return np.abs(np.asarray(x, np.float32) - np.asarray(exact)).max()

    assert error(ours) <= 2 * error(dense)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.sampled_from([1, 7]))
def test_steps_visit_each_used_tile_once_and_fetch_no_other(lengths, tile):
    capacity = 50
    steps = jax.jit(list_steps, static_argnums=(1, 2))(np.asarray(lengths), capacity, tile)
    count = int(steps.count)
    visited = [(int(x) >> TILE_BITS, int(x) & ((1 << TILE_BITS) - 1)) for x in np.asarray(steps.visited)[:count]]
    fetched = [(int(x) >> TILE_BITS, int(x) & ((1 << TILE_BITS) - 1)) for x in np.asarray(steps.fetched)[:count]]
    assert visited == [(b, t) for b, n in enumerate(lengths) for t in range(max(-(-n // tile), 1))]
    needed = [(b, t) for b, n in enumerate(lengths) for t in range(-(-n // tile))]
    moved = [now for now, before in zip(fetched, [None, *fetched], strict=False) if now != before]
    # With no context at all one tile still has to be named: the pipeline fetches it before the first step.
    assert moved == (needed or [(0, 0)])
    assert all(f == v for f, v in zip(fetched, visited, strict=True) if v in needed)


@pytest.mark.parametrize("chip", chip_names())
def test_16_rows_over_32768_slots_move_little_but_keys_and_values(chip):
    """Every tile that the pipeline moves, counted from the steps that the kernel runs; the bar is 5 %."""
    B, N, G, E, C = 8, 16, 8, 128, 32768
    shape = TreeShape(N, 4, G, E, C, 2)
    blocks = choose_blocks(shape, None, CHIPS[chip].device_kinds[0])
    assert blocks.resident == shape.rows  # otherwise the context would be read several times
    lengths = jnp.asarray([C, C - 1, 20000, 513, 512, 1, 0, C])
    steps = list_steps(lengths, C, blocks.context)
    fetched = np.asarray(steps.fetched[: int(steps.count)])
    tiles = G * (1 + int((fetched[1:] != fetched[:-1]).sum()))
    moved = tiles * 2 * blocks.context * E * 2
    moved += B * G * (2 * shape.rows + 2 * shape.padded_rows) * E * 2 + B * G * shape.padded_rows * 128 * 4
    # The last tile of a row is read whole: at most one tile a row and kv head more than the slots in use.
    assert moved <= 1.05 * (int(lengths.sum()) + B * blocks.context) * G * 2 * E * 2
    full = B * -(-C // blocks.context) * blocks.context
    rest = moved - tiles * 2 * blocks.context * E * 2
    assert full * G * 2 * E * 2 + rest <= 1.05 * B * C * G * 2 * E * 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"key_layout": "CEBG"}, "key_layout='CEBG'"),
        ({"words": None}, "come together"),
        ({"lengths": jnp.zeros(3, jnp.int32)}, r"lengths.shape=\(3,\)"),
        ({"context_k": jnp.zeros((2, 2, 16, 8))}, r"context_k.shape=\(2, 2, 16, 8\)"),
        ({"tree_k": jnp.zeros((2, 4, 2, 8), jnp.bfloat16)}, "tree_k.dtype=bfloat16"),
        ({"lengths": jnp.zeros(2)}, "lengths.dtype=float32"),
        ({"first_row": jnp.zeros(1, jnp.int32)}, r"first_row.shape=\(1,\)"),
        ({"first_row": 1.0 * jnp.zeros(())}, "first_row.dtype=float32"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
        ({"implementation": "pallas"}, "needs a TPU"),
        ({"implementation": "pallas", "interpret": True, "block_sizes": TreeBlocks(128, 48, 16, 128)}, "resident=48"),
    ],
)
def test_errors_name_what_is_wrong(changes, message):
    names = ("q", "context_k", "context_v", "lengths", "tree_k", "tree_v", "words")
    arguments = dict(zip(names, make(0, 2, 4, 4, 2, 8, 16, [3, 5]), strict=True))
    with pytest.raises(ValueError, match=message):
        tree_attention(**{**arguments, **changes})


def test_errors_of_sizes_and_trees():
    with pytest.raises(ValueError, match="slots=100 must be a positive multiple of 128"):
        TreeBlocks(512, 64, 64, 100)
    with pytest.raises(ValueError, match="needs .* MiB of VMEM, v4 offers"):
        choose_blocks(TreeShape(1024, 8, 8, 128, 4096, 2), TreeBlocks(512, 8192, 128, 512), "TPU v4")
    with pytest.raises(ValueError, match="num_rows=1025"):
        ancestor_words(jnp.zeros((1, 1025), jnp.int32))
    with pytest.raises(ValueError, match="chains=0"):
        chain_parents(0, 4)


def compile_shape(chip, B, N, C, H=32, G=8, E=128, dtype=jnp.bfloat16, **options):
    struct = jax.ShapeDtypeStruct
    arguments = (
        struct((B, N, H, E), dtype),
        struct((B, G, E, C), dtype),
        struct((B, G, C, E), dtype),
        struct((B,), jnp.int32),
        struct((B, N, G, E), dtype),
        struct((B, N, G, E), dtype),
        struct((B, N, 128), jnp.int32),
    )
    return compile_for(chip, lambda *a: tree_attention(*a, implementation="pallas", **options), *arguments)


def test_compiled_for_v5e_it_moves_keys_and_values_once_and_copies_neither():
    B, N, C = 8, 16, 32768
    compiled = compile_shape("v5e", B, N, C)
    cache = 2 * B * 8 * C * 128 * 2
    assert compiled.cost_analysis()["bytes accessed"] <= 1.05 * cache
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.01 * cache


def test_compiled_for_v5e_a_loop_over_layers_copies_no_layer_of_the_cache():
    """As the target's layers read it: a scan whose body names its layer. Slicing it out would copy every one of them."""
    L, B, N, H, G, E, C = 4, 8, 16, 16, 8, 128, 8192
    struct, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
    new, words = struct((B, N, G, E), dtype), struct((B, N, 128), jnp.int32)

    def run(q, keys, values, lengths, tree_k, tree_v, words):
        def layer(q, number):
            k, v = (x.reshape(-1, *x.shape[2:]) for x in (keys, values))
            first_row = number * B
            return tree_attention(
                q, k, v, lengths, tree_k, tree_v, words, first_row=first_row, implementation="pallas"
            ), None

        return jax.lax.scan(layer, q, jnp.arange(L))[0]

    caches = struct((L, B, G, E, C), dtype), struct((L, B, G, C, E), dtype)
    compiled = compile_for("v5e", run, struct((B, N, H, E), dtype), *caches, struct((B,), jnp.int32), new, new, words)
    layer_bytes = 2 * B * G * C * E * 2
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.05 * layer_bytes


@pytest.mark.slow
@pytest.mark.parametrize("chip", chip_names())
@pytest.mark.parametrize("rows", [16, 64, 256, 1024])
def test_the_grid_of_decode_shapes_compiles(chip, rows):
    for batch in (1, 8, 64):
        for capacity in (4096, 32768):
            cache = 2 * batch * 8 * capacity * 128 * 2
            if cache > 0.5 * CHIPS[chip].hbm_bytes:
                continue  # one layer's cache alone would not leave room for a model
            assert compile_shape(chip, batch, rows, capacity).memory_analysis().temp_size_in_bytes < cache


@pytest.mark.slow
@pytest.mark.parametrize("chip", chip_names())
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_other_head_sizes_and_float32_compile(chip, head_dim):
    compile_shape(chip, 2, 20, 1000, E=head_dim, with_lse=True)
    compile_shape(chip, 2, 20, 1000, E=head_dim, dtype=jnp.float32)
