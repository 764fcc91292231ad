"""Block attention compiled for TPUs that are not attached: it lowers, fits, and its hot tiles keep the matrix units busy."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import testing
from pallas_kernels.block_attention import block_attention

FEW = 14e6  # bytes of temporaries: 1 % of what splash attention takes with this mask
# Share of the issue cycles of the matrix units in the hot tiles, E = 128. 256 wide arrays are half filled.
MXU_BARS = {"v4": 0.65, "v5e": 0.65, "v5p": 0.65, "v6e": 0.45, "tpu7x": 0.45}


def training(
    gradient: bool = True, B: int = 1, A: int = 512, K: int = 16, H: int = 32, G: int = 8, E: int = 128, S: int = 3072,
    dtype: str = "bfloat16",
) -> tuple:  # fmt: skip
    """A builder for `schedules_of`: the Qwen3-8B training shape by default; q heads-major, as a model may leave it.

    With the gradient it returns the output, too, which is kept from forward to backward in any case.
    """
    struct = jax.ShapeDtypeStruct

    def attend(q, k, v, bk, bv, anchors):
        operands = (q.swapaxes(2, 3), k, v, bk.swapaxes(2, 3), bv.swapaxes(2, 3))
        return block_attention(*operands, anchors).swapaxes(2, 3)

    def both(do, *x):
        out, pull = jax.vjp(lambda *y: attend(*y, x[-1]), *x[:-1])
        return out, pull(do)

    q, own, context = struct((B, A, H, K, E), dtype), struct((B, A, G, K, E), dtype), struct((B, G, S, E), dtype)
    structs = (q, context, context, own, own, struct((B, A), jnp.int32))
    return (both, (q, *structs)) if gradient else (attend, structs)


def test_training_shape_compiles_for_v5e_with_few_temporaries_and_a_busy_hot_tile() -> None:
    report = testing.schedules_of("v5e", f"{Path(__file__)}:training", {"gradient": False}, "block_attention")
    hot = report.schedule("block_attention_forward").hot
    assert hot.utilisation("MXU") >= MXU_BARS["v5e"], hot
    assert hot.spills + hot.fills == 0, hot
    assert report.temporary_bytes <= FEW


@pytest.mark.slow
@pytest.mark.parametrize("chip", testing.chip_names())
def test_training_shape_meets_the_bars_on_every_chip(chip: str) -> None:
    report = testing.schedules_of(chip, f"{Path(__file__)}:training", {"gradient": True}, "block_attention")
    for kernel in ("block_attention_forward", "block_attention_backward"):
        hot = report.schedule(kernel).hot
        assert hot.utilisation("MXU") >= MXU_BARS[chip], hot
        assert hot.spills + hot.fills == 0, hot
    assert report.temporary_bytes <= FEW


@pytest.mark.slow
@pytest.mark.parametrize("chip", testing.chip_names())
@pytest.mark.parametrize("E", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_sizes_compile_for_every_chip(chip: str, E: int, dtype: str) -> None:
    function, structs = training(A=24, H=4, G=2, E=E, S=1000, dtype=dtype)
    testing.compile_for(chip, function, *structs)


@pytest.mark.slow
@pytest.mark.parametrize("chip", testing.chip_names())
@pytest.mark.parametrize(
    ("K", "H", "G", "S"), [(2, 1, 1, 1), (4, 2, 1, 7), (8, 8, 1, 127), (32, 8, 2, 129), (16, 4, 4, 40960)]
)
def test_odd_shapes_compile_for_every_chip(chip: str, K: int, H: int, G: int, S: int) -> None:
    function, structs = training(A=5, K=K, H=H, G=G, S=S)
    testing.compile_for(chip, function, *structs)


@pytest.mark.slow
@pytest.mark.parametrize("chip", testing.chip_names())
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("context", [4096, 32768])
def test_decoding_shapes_compile_for_every_chip(chip: str, batch: int, context: int) -> None:
    function, structs = training(gradient=False, B=batch, A=1, S=context)
    testing.compile_for(chip, function, *structs)
