"""Writing into the key/value cache, in the two ways that devices want, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.models import kv_cache

L, B, N, G, E, C = 3, 4, 5, 2, 8, 32
START = np.array([0, 7, 27, 11])  # the third row fills its last slots


@pytest.mark.parametrize("layers", [None, 1, slice(None)])
@pytest.mark.parametrize("tpu", [False, True])
def test_rows_are_written_from_their_own_slot_on(tpu: bool, layers: int | slice | None, monkeypatch) -> None:
    monkeypatch.setattr(kv_cache, "on_tpu", lambda: tpu)
    random = np.random.default_rng(0)
    leading = () if layers is None else (L,)
    keys, values = random.normal(size=(*leading, B, G, E, C)), random.normal(size=(*leading, B, G, C, E))
    inner = (L,) if isinstance(layers, slice) else ()
    k, v = (random.normal(size=(B, N, *inner, G, E)) for _ in range(2))
    where = None if layers is None else layers if isinstance(layers, slice) else jnp.int32(layers)
    found = kv_cache.write_slots((jnp.asarray(keys), jnp.asarray(values)), (k, v), jnp.asarray(START), where)
    for layer in range(L):
        if layers is None or isinstance(layers, slice) or layer == layers:
            part = (...,) if layers is None else (layer,)
            for row, first in enumerate(START):
                new_k, new_v = (x[row, :, layer] if inner else x[row] for x in (k, v))  # [N, G, E]
                keys[part][row, :, :, first : first + N] = new_k.transpose(1, 2, 0)
                values[part][row, :, first : first + N] = new_v.swapaxes(0, 1)
    np.testing.assert_array_equal(found[0], keys.astype(np.float32))
    np.testing.assert_array_equal(found[1], values.astype(np.float32))
