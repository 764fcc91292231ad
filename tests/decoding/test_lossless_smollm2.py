"""On a real language model: every method, temperature and batch emits exactly the tokens of plain decoding."""

import jax
import numpy as np
import pytest

from dstill_jax.data.prompt_sets import read_prompts, render
from dstill_jax.decoding.generate import generate
from dstill_jax.distill.initialise import DrafterShape, new_params
from dstill_jax.models.drafter import Drafter
from dstill_jax.weights.embedded import fetch
from dstill_jax.weights.load import load_target

pytestmark = pytest.mark.slow

NEW_TOKENS = 32
METHODS = (
    ("lookup", {}),
    ("dflash", {}),
    ("dflash", {"draft_tokens": 3}),
    ("refine", {"passes": 3, "order": "confidence"}),
    ("refine", {}),
    ("ddtree", {}),
    ("ddtree", {"tree_budget": 64}),
)
SAMPLING = ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 1.0})


@pytest.fixture(scope="module")
def material():
    target = load_target(fetch("smollm2"))
    prompts = [p for p in render(target, read_prompts("gsm8k", 40)) if len(p) <= 96][:14]
    shape = DrafterShape(mask_token_id=16, num_layers=2, block_size=8, init_from_layers=(28, 29))
    config = shape.build(target.config)
    params = new_params(shape, config, target.config, target.params, jax.random.key(0))
    return target, prompts, Drafter(config, params)


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda s: f"T={s['temperature']}")
def test_every_method_and_batch_emits_the_tokens_of_plain_decoding(material, sampling: dict) -> None:
    target, prompts, drafter = material
    options = {"max_new_tokens": NEW_TOKENS, "seed": 11, **sampling}
    plain = generate(target, prompts, **options).tokens
    compared, different = 0, []
    for method, extra in METHODS:
        together = generate(target, prompts, method, drafter, **options, **extra).tokens
        for i, tokens in enumerate(together):
            compared += 1
            if tokens != plain[i]:
                different.append((method, extra, i, len(prompts)))
        compared += 1
        if generate(target, prompts[:1], method, drafter, **options, **extra).tokens[0] != plain[0]:
            different.append((method, extra, 0, 1))
    assert compared == len(METHODS) * (len(prompts) + 1)  # 105 at each temperature
    assert not different
    assert len({tuple(np.asarray(t)) for t in plain}) > len(prompts) // 2  # the prompts do not all say the same
