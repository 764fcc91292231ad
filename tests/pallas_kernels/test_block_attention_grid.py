"""The simulated kernels over the whole grid of shapes, and over what hypothesis draws. Mostly slow: each is compiled anew."""

import jax.numpy as jnp
import numpy as np
import pytest
from block_cases import Shape, adversarial_anchors, arrays, assert_close, run
from hypothesis import given, settings
from hypothesis import strategies as st

F32 = 2e-5  # float32 sums in another order

SHAPES = {
    **{f"K{K}": Shape(A=9, K=K, R=K, S=140) for K in (2, 4, 8, 16, 32)},
    **{f"E{E}": Shape(A=6, E=E, S=140) for E in (64, 80, 96, 128, 256)},
    **{f"H{H}G{G}": Shape(A=6, H=H, G=G, S=140) for H, G in ((1, 1), (2, 2), (4, 2), (4, 1), (8, 1))},
    **{f"S{S}": Shape(A=6, S=S) for S in (1, 7, 127, 128, 129, 1000)},
    "R below K": Shape(A=9, K=16, R=5, H=4, G=2, S=140),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_agrees_with_the_reference(name: str) -> None:
    shape = SHAPES[name]
    inputs, anchors = arrays(shape), adversarial_anchors(shape)["random"][None]
    assert_close(run("pallas", inputs, anchors), run("reference", inputs, anchors), F32)


TWICE = (  # anchors, slots, heads, kv heads, context
    (5, 8, 2, 1, 140),
    pytest.param(12, 16, 4, 1, 300, marks=pytest.mark.slow),
    pytest.param(12, 16, 4, 1, 3072, marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("A", "K", "H", "G", "S"), TWICE)
def test_bfloat16_errs_at_most_twice_as_much_as_bfloat16_xla(A: int, K: int, H: int, G: int, S: int) -> None:
    shape = Shape(A=A, K=K, R=K, H=H, G=G, E=128, S=S, dtype="bfloat16")
    inputs, anchors = arrays(shape), np.random.default_rng(2).integers(0, S + 1, (1, A))
    exact = run("reference", tuple(x.astype(jnp.float32) for x in inputs), anchors)
    xla, pallas = run("xla", inputs, anchors), run("pallas", inputs, anchors)
    for name, wanted in exact.items():
        bound, error = (np.abs(x[name] - wanted).max() for x in (xla, pallas))
        # One unit in the last place of a bfloat16 output besides: XLA's largest error may round to nothing.
        assert error <= 2 * bound + np.abs(wanted).max() * 2**-9, (name, error, bound)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.data())
def test_drawn_shapes_rules_and_anchors_agree_with_the_reference(data: st.DataObject) -> None:
    G, group = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2, 3]))
    K = data.draw(st.integers(1, 9))
    shape = Shape(
        B=data.draw(st.integers(1, 2)), A=data.draw(st.integers(1, 12)), K=K, R=data.draw(st.integers(1, K)),
        H=G * group, G=G, E=data.draw(st.sampled_from([8, 64])), S=data.draw(st.integers(1, 300)),
    )  # fmt: skip
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    anchors = rng.integers(-2, shape.S + 3, (shape.B, shape.A))
    options = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.sampled_from([None, 1, 4, 150])),
        "valid": jnp.asarray(rng.random(anchors.shape) < 0.8),
        "slots": jnp.asarray(rng.integers(0, K, (shape.B, shape.A, shape.R))),
    }
    if data.draw(st.booleans()):
        options["context_documents"] = jnp.asarray(np.sort(rng.integers(0, 4, (shape.B, shape.S)), axis=1))
    inputs = arrays(shape, 1)
    assert_close(run("pallas", inputs, anchors, **options), run("reference", inputs, anchors, **options), F32)
