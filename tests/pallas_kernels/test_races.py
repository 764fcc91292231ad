"""The race detection that the kernels' tests rely on finds races: of any kernel of a call, and it notices when it is off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from races import EAGER, LATE, no_race


def double(x: jax.Array, waits: str, interpret: pltpu.InterpretParams) -> jax.Array:
    """2 x, in a kernel that fetches x itself, twice. It waits for the first copy "before" it reads, "after", or "never"."""

    def kernel(x_hbm: jax.Ref, out: jax.Ref, copies: jax.Ref, semaphores: jax.Ref) -> None:
        first, second = (pltpu.make_async_copy(x_hbm, copies.at[i], semaphores.at[i]) for i in range(2))
        first.start()
        second.start()
        if waits == "before":
            first.wait()
        second.wait()  # stands for no other copy
        out[...] = copies[0] + copies[1]
        if waits == "after":
            first.wait()

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=x,
        scratch_shapes=[pltpu.VMEM((2, *x.shape), x.dtype), pltpu.SemaphoreType.DMA((2,))],
        interpret=interpret,
    )(x)


def in_a_row(waits: tuple[str, ...], interpret: pltpu.InterpretParams) -> jax.Array:
    """A jitted call of one kernel after another."""
    return jax.jit(lambda x: functools.reduce(lambda x, w: double(x, w, interpret), waits, x))(jnp.ones((8, 128)))


@pytest.mark.parametrize("interpret", [EAGER, LATE], ids=["eager", "late"])
def test_kernels_that_wait_pass(interpret: pltpu.InterpretParams) -> None:
    with no_race():
        out = in_a_row(("before", "before"), interpret)
    np.testing.assert_array_equal(out, np.full((8, 128), 4.0))


@pytest.mark.parametrize(
    ("waits", "interpret"),
    [
        pytest.param(("never",), EAGER, id="never, eager"),
        pytest.param(("after",), EAGER, id="after, eager"),
        pytest.param(("after",), LATE, id="after, late"),
        # Jax's own record is of the last kernel, which is right.
        pytest.param(("never", "before"), EAGER, id="the first of two"),
        pytest.param(("before", "after", "before"), LATE, id="the second of three"),
    ],
)
def test_a_kernel_that_reads_what_it_has_not_waited_for_is_caught(
    waits: tuple[str, ...], interpret: pltpu.InterpretParams
) -> None:
    racy = next(i for i, w in enumerate(waits) if w != "before")
    with pytest.raises(AssertionError, match=rf"races in kernels \[{racy}\] of {len(waits)}"), no_race():
        in_a_row(waits, interpret)


def test_it_notices_that_nothing_was_watched() -> None:
    with pytest.raises(AssertionError, match="no kernel was simulated"), no_race():
        jnp.ones(3).sum()
    with pytest.raises(AssertionError, match="was not watched"), no_race():
        in_a_row(("before",), pltpu.InterpretParams())
