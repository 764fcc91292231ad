"""The counter of compiled programs against counts made by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded_case

from dstill_jax.planning.count import Program
from dstill_jax.planning.hlo import replica_groups, shapes_of
from pallas_kernels import testing
from pallas_kernels.block_attention import context_attention, cost


def count(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return Program(jax.jit(function).lower(*arguments).compile().as_text()).count()


def test_a_product_is_two_operations_a_multiply_add() -> None:
    assert count(lambda a, b: a @ b, (32, 64), (64, 16)).flops == 2 * 32 * 64 * 16


def test_batched_products_and_gradients_are_counted_once_each() -> None:
    def loss(q, k):
        return jnp.einsum("bhqd,bhkd->bhqk", q, k).sum()

    assert count(loss, (2, 3, 16, 8), (2, 3, 24, 8)).flops == 2 * 2 * 3 * 16 * 24 * 8

    def square(a, b):
        return jnp.sum(jnp.tanh(a @ b) ** 2)

    # forward, and one product for each gradient
    assert count(jax.grad(square, argnums=(0, 1)), (8, 16), (16, 4)).flops == 3 * 2 * 8 * 16 * 4


@pytest.mark.parametrize("length", [1, 7, 40])
def test_the_body_of_a_scan_counts_as_often_as_it_runs(length: int) -> None:
    def chain(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    found = count(chain, (8, 32), (length, 32, 32))
    assert found.flops == length * 2 * 8 * 32 * 32
    assert not found.notes
    # Each pass reads its own slice of the weights, not all of them.
    assert length * 32 * 32 * 4 <= found.hbm_bytes <= length * (32 * 32 * 4 * 4 + 8 * 32 * 4 * 12) + 4096


def test_nested_loops_multiply() -> None:
    def nested(x, w):
        def outer(_, x):
            return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)

        return jax.lax.fori_loop(2, 9, outer, x)

    assert count(nested, (8, 8), (8, 8)).flops == 7 * 5 * 2 * 8 * 8 * 8


def test_of_two_branches_the_dearer_counts() -> None:
    def either(p, x, w):
        return jax.lax.cond(p[0] > 0, lambda x: jnp.tanh(x @ w) @ w, lambda x: x, x)

    assert count(either, (1,), (8, 8), (8, 8)).flops == 2 * 2 * 8 * 8 * 8


# Lines as the TPU compiler writes them: a batched product is a convolution over a dilated axis, and VMEM is S(1).
_TPU_TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%body (p: (...)) -> (...) {
  %p = CARRY parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%p), index=0
  %q = bf16[2,8,256,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %k = bf16[2,8,256,128]{3,2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=2
  %g = f32[8,128]{1,0} get-tuple-element(%p), index=3
  %scores = SCORES convolution(%q, %k), window={size=2x8 stride=1x7 lhs_dilate=2x8}, dim_labels=01bf_01oi->01bf
  %all-reduce.1 = f32[8,128]{1,0} all-reduce(%g), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  %all-gather.1 = f32[64,128]{1,0} all-gather(%g), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t = CARRY tuple(%n, %q, %k, %all-reduce.1)
}

%condition (p.1: (...)) -> pred[] {
  %p.1 = CARRY parameter(0)
  %n.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %end = s32[]{:T(128)} constant(6)
  ROOT %less = pred[]{:T(512)} compare(%n.1, %end), direction=LT
}

ENTRY %main (a: bf16[2,8,256,128], b: bf16[2,8,256,128], c: f32[8,128]) -> f32[8,128] {
  %a = bf16[2,8,256,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[2,8,256,128]{3,2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %c = f32[8,128]{1,0} parameter(2)
  %start = s32[]{:T(128)} constant(2)
  %first = CARRY tuple(%start, %a, %b, %c)
  %loop = CARRY while(%first), condition=%condition, body=%body
  ROOT %out = f32[8,128]{1,0} get-tuple-element(%loop), index=3
}
"""


@pytest.mark.parametrize(("step", "times"), [(1, 4), (2, 2), (3, 2)])
def test_a_loop_that_the_compiler_unrolled_counts_its_steps(step: int, times: int) -> None:
    text = _tpu_text().replace("tuple(%n, %q", "tuple(%next, %q")
    added = f"  %by = s32[]{{:T(128)}} constant({step})\n  %next = s32[]{{:T(128)}} add(%n, %by)\n  %q = "
    found = Program(text.replace("  %q = ", added, 1)).count()
    assert found.flops == times * 2 * (2 * 8) * 256 * 256 * 128


_TYPES = {
    "CARRY": (
        "(s32[]{:T(128)}, bf16[2,8,256,128]{3,2,1,0:T(8,128)(2,1)}, bf16[2,8,256,128]{3,2,1,0:T(8,128)(2,1)S(1)},"
        " f32[8,128]{1,0})"
    ),
    "SCORES": "bf16[2,8,256,256]{3,2,1,0:T(8,128)(2,1)S(1)}",
}


def _tpu_text() -> str:
    return functools.reduce(lambda text, name: text.replace(name, _TYPES[name]), _TYPES, _TPU_TEXT)


def test_a_tpu_program_written_by_hand() -> None:
    found = Program(_tpu_text(), num_slices=2).count()
    assert found.flops == 4 * 2 * (2 * 8) * 256 * 256 * 128  # the loop runs from 2 to 6
    block = 8 * 128 * 4
    moved = {(c.kind, c.group, c.crosses_slices): (c.times, c.bytes) for c in found.by_kind()}
    assert moved == {
        ("all-reduce", 4, False): (4, 4 * 2 * block * 3 / 4),  # within each slice of four
        ("all-gather", 8, True): (4, 4 * block * 7),  # over both
    }
    assert found.network_bytes(False) + found.network_bytes(True) == sum(b for _, b in moved.values())
    query = 2 * 8 * 256 * 128 * 2
    assert found.hbm_bytes == 4 * (query + 2 * block + block + 8 * block)  # keys and scores live in VMEM


_PIECES = """HloModule m, num_partitions=8

%first (p: f32[8,128]) -> (f32[8,128], f32[64,128]) {
  %p = f32[8,128]{1,0} parameter(0)
  %g = f32[64,128]{1,0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
  ROOT %t = (f32[8,128]{1,0}, f32[64,128]{1,0}) tuple(%p, %g)
}

%second (q: f32[8,128], r: f32[64,128]) -> f32[64,128] {
  %q = f32[8,128]{1,0} parameter(0)
  %r = f32[64,128]{1,0} parameter(1)
  ROOT %h = f32[64,128]{1,0} all-gather(%q), channel_id=3, replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
}

ENTRY %main (a: f32[8,128]) -> f32[64,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %start = (f32[8,128]{1,0}, f32[64,128]{1,0}) fusion(%a), kind=kCustom, calls=%first
  %x = f32[8,128]{1,0} get-tuple-element(%start), index=0
  %y = f32[64,128]{1,0} get-tuple-element(%start), index=1
  ROOT %done = f32[64,128]{1,0} fusion(%x, %y), kind=kCustom, calls=%second
}
"""


def test_a_gather_in_pieces_counts_once() -> None:
    found = Program(_PIECES).count()
    (gather,) = found.by_kind()
    assert (gather.times, gather.bytes) == (1, 8 * 128 * 4 * 7)
    share, whole = 8 * 128 * 4, 64 * 128 * 4
    assert found.hbm_bytes == whole + 3 * share  # written once; the share is read, handed on and read


def test_a_permutation_that_runs_beside_others_moves_its_array() -> None:
    """What starts it gives (source, destination, and two numbers of the transfer)."""
    one = "f32[8,128]{1,0}"
    text = f"""HloModule m, num_partitions=2

ENTRY %main (a: f32[8,128]) -> f32[8,128] {{
  %a = {one} parameter(0)
  %s = ({one}, {one}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT %d = {one} collective-permute-done(%s)
}}
"""
    found = Program(text).count()
    (moved,) = found.by_kind()
    assert (moved.kind, moved.times, moved.bytes) == ("collective-permute", 1, 8 * 128 * 4)
    assert found.hbm_bytes == 2 * 8 * 128 * 4


def test_what_is_written_over_a_part_of_an_array_moves_that_part() -> None:
    """Alone and in a fusion; the array may be a whole cache."""
    whole, part, places = "f32[1000,128]{1,0}", "f32[3,128]{1,0}", "s32[3,1]{1,0}"
    scatter = "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1"
    text = f"""HloModule m

%fused (p: f32[1000,128], q: s32[3,1], r: f32[3,128]) -> f32[1000,128] {{
  %p = {whole} parameter(0)
  %q = {places} parameter(1)
  %r = {part} parameter(2)
  ROOT %s = {whole} scatter(%p, %q, %r), {scatter}, to_apply=%add
}}

ENTRY %main (a: f32[1000,128], b: s32[3,1], c: f32[3,128]) -> f32[1000,128] {{
  %a = {whole} parameter(0)
  %b = {places} parameter(1)
  %c = {part} parameter(2)
  %d = {whole} scatter(%a, %b, %c), {scatter}, to_apply=%add
  ROOT %e = {whole} fusion(%d, %b, %c), kind=kLoop, calls=%fused
}}
"""
    update, index = 3 * 128 * 4, 3 * 4
    assert Program(text).count().hbm_bytes == (2 * update + index) + (3 * update + index)  # fused, it is read apart


def test_a_layer_sliced_inside_a_fusion_of_a_fusion_is_what_is_read() -> None:
    """As the TPU compiler writes a product with one layer of stacked weights; a bitcast lies between."""
    stack, layer, x = "f32[36,8,128]{2,1,0}", "f32[1,8,128]{2,1,0}", "f32[4,8]{1,0}"
    text = f"""HloModule m

%slice (p: f32[36,8,128], n: s32[]) -> f32[8,128] {{
  %p = {stack} parameter(0)
  %same = {stack} bitcast(%p)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = {layer} dynamic-slice(%same, %n, %zero, %zero), dynamic_slice_sizes={{1,8,128}}
  ROOT %flat = f32[8,128]{{1,0}} bitcast(%one)
}}

%product (q: f32[36,8,128], m: s32[], x: f32[4,8]) -> f32[4,128] {{
  %q = {stack} parameter(0)
  %m = s32[] parameter(1)
  %x = {x} parameter(2)
  %w = f32[8,128]{{1,0}} fusion(%q, %m), kind=kLoop, calls=%slice
  ROOT %y = f32[4,128]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: f32[36,8,128], b: s32[], c: f32[4,8]) -> f32[4,128] {{
  %a = {stack} parameter(0)
  %b = s32[] parameter(1)
  %c = {x} parameter(2)
  ROOT %d = f32[4,128]{{1,0}} fusion(%a, %b, %c), kind=kOutput, calls=%product
}}
"""
    found = Program(text).count()
    assert found.flops == 2 * 4 * 8 * 128
    assert found.hbm_bytes == 4 * (8 * 128 + 1 + 4 * 8 + 4 * 128)


def test_a_kernel_moves_what_it_states_less_what_lies_in_vmem() -> None:
    cache, query = "bf16[24,2,2048,128]{3,2,1,0}", "bf16[8,2,32,128]{3,2,1,0:T(8,128)(2,1)S(1)}"
    text = f"""HloModule m

ENTRY %main (a: bf16[24,2,2048,128], b: bf16[8,2,32,128]) -> bf16[8,2,32,128] {{
  %a = {cache} parameter(0)
  %b = {query} parameter(1)
  ROOT %k = {query} custom-call(%b, %a), custom_call_target="tpu_custom_call",
 backend_config={{"cost_estimate":{{"flops":"7","bytes_accessed":"9000000"}}}}
}}
""".replace(",\n backend", ", backend")
    found = Program(text).count()
    assert (found.flops, found.hbm_bytes) == (7, 9_000_000 - 2 * 8 * 2 * 32 * 128 * 2)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
    ],
)
def test_groups_of_a_collective(text: str, groups: list) -> None:
    np.testing.assert_array_equal(replica_groups(text), groups)


def test_shapes_are_read_with_their_memory() -> None:
    first, second = shapes_of("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, f32[]{:T(128)})")
    assert (first.size, first.in_hbm, second.size, second.in_hbm) == (12, False, 4, True)


def test_collectives_of_a_sharded_product_by_hand() -> None:
    found = sharded_case.call("counted_product", devices=8)
    rows, width = 64, 32
    # x [rows / 8, width] @ gathered w [width, width]; the compiler joins the gathers of both passes. dw is scattered.
    assert found["all-gather"] == [1, width * width * 4 * 7 / 8]
    assert found["flops"] == 3 * 2 * (rows / 8) * width * width
    assert found["summed"] == width * width * 4 * 7 / 8 * found["per_sum"]


def test_a_kernel_counts_by_its_shape_and_so_does_the_same_operation_in_xla() -> None:
    """XLA multiplies the whole context; the kernel declares what rows at evenly spread anchors see of it."""
    A, K, H, G, E, S = 16, 16, 4, 2, 128, 512
    struct = jax.ShapeDtypeStruct
    q, context = struct((1, A, K, H, E), jnp.bfloat16), struct((1, G, S, E), jnp.bfloat16)
    anchors, rows = struct((1, A), jnp.int32), A * K * H

    def flops(implementation: str) -> float:
        def gradients(q, k, v, anchors, upstream):
            def attend(*x):
                # A part of the blocks at a time is computed again in the backward pass, as the kernel does.
                return context_attention(*x, anchors, implementation=implementation, chunk=A // 2)[0]

            out, pull = jax.vjp(attend, q, k, v)
            return out, pull(upstream)

        compiled = testing.compile_for("v5e", gradients, q, context, context, anchors, q)
        found = Program(compiled.as_text()).count()
        assert not found.notes
        return found.flops

    products = cost.FORWARD_PRODUCTS + cost.BACKWARD_PRODUCTS
    assert flops("xla") == cost.product_flops(
        products + 1, rows, E, S, 0
    )  # its backward pass makes the output again, too
    assert flops("pallas") == cost.product_flops(products, rows, E, S * cost.MEAN_SHARE, 0)
