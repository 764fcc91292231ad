"""The compiled decode loop updates its caches in place: a copy per step would cost as much as reading them."""

import re
from pathlib import Path

import numpy as np
import pytest

from dstill_jax.decoding.rounds import decode_rounds
from dstill_jax.decoding.session import Session
from dstill_jax.weights.load import load_drafter, load_target

CASE = Path(__file__).parents[1] / "reference" / "qwen3_tiny"


@pytest.mark.parametrize(
    ("method", "batch_size", "scan_layers"),
    [
        ("autoregressive", 1, False),
        ("autoregressive", 1, True),
        ("autoregressive", 4, False),
        ("dflash", 1, False),
        ("ddtree", 1, False),
        ("ddtree", 4, True),
    ],
)
def test_no_cache_is_copied_in_the_loop(method: str, batch_size: int, scan_layers: bool) -> None:
    target = load_target(CASE / "target", scan_layers=scan_layers)
    session = Session(
        target,
        drafter=load_drafter(CASE / "draft", target),
        method=method,
        batch_size=batch_size,
        max_prompt_tokens=50,
        max_new_tokens=67,
    )
    state = session.idle()
    caches = {f"f32[{','.join(map(str, x.shape))}]" for x in (*state.cache.keys, *state.cache.values)}
    caches |= {f"f32[{','.join(map(str, x.shape))}]" for pair in state.context for x in pair}
    compiled = decode_rounds.lower(session.spec, session.weights, state, np.int32(5)).compile()
    copied = [made for made in re.findall(r"= (f32\[[\d,]+\])\S* copy\(", compiled.as_text()) if made in caches]
    assert not copied
    # Donated: the new state lives in the old one's memory.
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(
        x.nbytes for x in (*state.cache.keys, *state.cache.values)
    )
