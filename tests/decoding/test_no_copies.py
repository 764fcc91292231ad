"""Memory of the compiled decode loop: caches are updated in place, and logits exist of few rows at a time."""

import re

import numpy as np
import pytest
from tiny_models import random_drafter, random_target, stored_target

from dstill_jax.decoding import rounds
from dstill_jax.decoding.rounds import decode_rounds
from dstill_jax.decoding.sampling import SamplingConfig
from dstill_jax.decoding.session import Request, Session
from dstill_jax.weights.load import load_target


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
    target = load_target(stored_target(), scan_layers=scan_layers)
    session = Session(
        target,
        drafter=random_drafter(target),
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


@pytest.mark.parametrize("method, sampling", [("dflash", SamplingConfig(1.0, 3)), ("ddtree", SamplingConfig())])
def test_logits_of_a_verification_are_made_in_parts(method: str, sampling: SamplingConfig, monkeypatch) -> None:
    """The same tokens, in a fraction of the memory: here of two rows at a time, the last part half full."""
    target = random_target(vocab_size=5000)
    drafter = random_drafter(target)
    options = {"tree_budget": 16} if method == "ddtree" else {}
    shape = {"batch_size": 2, "max_prompt_tokens": 4, "max_new_tokens": 12, "stop_token_ids": []}
    found, sizes = [], []
    for room in (rounds._LOGITS, 2 * 2 * 5000):
        monkeypatch.setattr(rounds, "_LOGITS", room)
        decode_rounds.clear_cache()
        session = Session(target, drafter=drafter, method=method, sampling=sampling, **shape, **options)
        requests = [Request(i, [3 + i, 7, 11, 2]) for i in range(2)]
        found.append({c.id: (c.tokens, c.acceptance_lengths) for c in session.run(requests)})
        compiled = decode_rounds.lower(session.spec, session.weights, session.idle(), np.int32(5)).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    decode_rounds.clear_cache()
    assert found[0] == found[1]
    assert sizes[0] - sizes[1] >= (600_000 if method == "ddtree" else 40_000), sizes  # 15 rows less; 3 of 5
