"""A drafter that was trained on some tokens drafts only those, and everything else stays as it was."""

import dataclasses

import numpy as np
import pytest
from plain_decoding import NEW, REQUESTS, decode, run

from dstill_jax.decoding.sampling import SamplingConfig
from dstill_jax.decoding.session import Session

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = {"batch_size": 3, "max_prompt_tokens": 32, "max_new_tokens": NEW, "stop_token_ids": []}
METHODS = [("dflash", {}), ("refine", {"order": "confidence", "passes": 2}), ("ddtree", {"tree_budget": 20})]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method, options", METHODS)
def test_drafts_are_of_the_vocabulary_and_the_text_is_that_of_plain_decoding(
    target, drafter, method, options, temperature
):
    some = tuple(range(0, 37, 3))
    mask = drafter.config.mask_token_id
    assert mask in some  # stored by mistake, and still never drafted
    few = dataclasses.replace(drafter, vocabulary=some)
    session = Session(target, drafter=few, method=method, sampling=SamplingConfig(temperature), **SHAPE, **options)
    state = session.start(session.idle(), [0, 1, 2], REQUESTS[:3], 3)
    drafts = session.spec.proposer.propose(session.spec, session.weights, state)
    drafts = np.asarray(drafts.tokens[drafts.valid] if method == "ddtree" else drafts)
    assert set(drafts.ravel().tolist()) <= set(some) - {mask}
    done = run(session, REQUESTS[:3])
    assert [done[i].tokens for i in range(3)] == [decode(target, r, NEW, temperature) for r in REQUESTS[:3]]


@pytest.mark.parametrize("method, options", [*METHODS[:2], pytest.param(*METHODS[2], marks=pytest.mark.slow)])
def test_the_whole_vocabulary_drafts_what_no_vocabulary_drafts(target, drafter, method, options):
    sampling = SamplingConfig(0.9)
    every = dataclasses.replace(drafter, vocabulary=tuple(range(37)))
    whole, listed = (
        run(Session(target, drafter=d, method=method, sampling=sampling, **SHAPE, **options), REQUESTS)
        for d in (drafter, every)
    )
    assert whole == listed
