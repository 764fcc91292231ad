"""Rounds that verify a tree: caches and features of the accepted path, simulated acceptance, chains beside the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoding import NEW, REQUESTS, decode, run
from tiny_models import block_logits, random_target, stack_layers
from tree_cases import accepted_in_tree

from dstill_jax.decoding import rounds
from dstill_jax.decoding.sampling import SamplingConfig
from dstill_jax.decoding.session import Request, Session
from dstill_jax.decoding.trees import build_tree
from dstill_jax.models import drafter as drafter_lib
from dstill_jax.models import kv_cache
from dstill_jax.models import target as target_lib
from dstill_jax.models.target import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = {"batch_size": 3, "max_prompt_tokens": 32, "max_new_tokens": NEW, "stop_token_ids": []}
THREE = [Request(i, REQUESTS[i].tokens, 5) for i in range(3)]


def finished(session, requests):
    """The state after all rounds of a batch that is never refilled."""
    state = session.start(session.idle(), list(range(len(requests))), requests, len(requests))
    return session.advance(state, NEW)


@functools.partial(jax.jit, static_argnames=("target", "drafter"))
def _fresh(target, drafter, params, drafter_params, tokens, positions):
    cache = target_lib.init_cache(target, 1, tokens.shape[1], jnp.float32, target_lib.is_stacked(params))
    start = jnp.zeros(1, jnp.int32)
    out = target_lib.forward(target, params, tokens, positions, cache, start, drafter.target_layer_ids)
    c = drafter_lib.project_context(drafter, drafter_params, out.taps)
    return out, drafter_lib.context_kv(drafter, drafter_params, c, positions)


@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_kept_of_a_tree_is_what_a_fresh_pass_over_the_text_computes(target, drafter, stacked):
    """Cache, drafter context and features of rows that left the greedy path at every depth, several times in a row."""
    if stacked:
        target = Target(target.config, stack_layers(target.params), "memory", target.fingerprint)
    session = Session(target, drafter=drafter, method="ddtree", tree_budget=200, record_taps=(0, 1), **SHAPE)
    state = finished(session, THREE)
    accepted = np.asarray(state.commits) - 1
    assert {1, 2} <= set(accepted[:, :8].ravel().tolist())  # otherwise nothing was seen
    for row, request in enumerate(THREE):
        n = len(request.tokens) + NEW - 1  # the last token has not been read
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : n + 1] = [*request.tokens, *decode(target, request)]
        assert state.tokens[row, : n + 1].tolist() == tokens[0, : n + 1].tolist()
        out, context = _fresh(target.config, drafter.config, target.params, drafter.params, tokens, np.arange(64)[None])
        # Sums run in another order than in a pass over the whole text: float32 rounding through two layers.
        close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
        for kept, fresh in zip(state.cache.keys, out.cache.keys, strict=True):
            close(kept[:, row, ..., :n], fresh[:, 0, ..., :n])
        for kept, fresh in zip(state.cache.values, out.cache.values, strict=True):
            close(kept[:, row, :, :n], fresh[:, 0, :, :n])
        for (k, v), (fresh_k, fresh_v) in zip(state.context, context, strict=True):
            close(k[row, ..., :n], fresh_k[0, ..., :n])
            close(v[row, :, :n], fresh_v[0, :, :n])
        features = np.concatenate([out.taps, out.hidden], -1)[0, :n]
        np.testing.assert_allclose(state.features[row, :n], features, rtol=2e-3, atol=2e-3)  # kept as float16


@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_simulated_acceptance_is_that_of_decoding(target, drafter, budget):
    """From the target's text alone: at each anchor the tree of the drafter's logits, and how far the text lies in it."""
    done = run(Session(target, drafter=drafter, method="ddtree", tree_budget=budget, **SHAPE), THREE)
    mask = drafter.config.mask_token_id
    for request in THREE:
        text = [*request.tokens, *decode(target, request)]
        at, simulated = len(request.tokens), []  # of the anchor; the prefill draws the first token
        while at + 1 < len(text):
            block = [text[at], *[mask] * (drafter.config.block_size - 1)]
            logits = block_logits(target, drafter.config, drafter.params, text, at, block, width=64)[1:]
            logits[:, mask] = -np.inf
            tree = build_tree(logits.astype(np.float32), budget)
            most = min(accepted_in_tree(tree.tokens, tree.parents, tree.valid, text[at + 1 :]) + 1, len(text) - at - 1)
            simulated.append(most)
            at += most
        assert done[request.id].acceptance_lengths == simulated


@pytest.mark.parametrize("method, batch", [("autoregressive", 1), ("dflash", 3)])
def test_a_chain_beside_the_cache_is_the_chain_in_it(target, drafter, monkeypatch, method, batch):
    """What TPUs run: the kernel reads the cache and the new rows apart, and the accepted ones are written afterwards."""
    sampling = SamplingConfig(0.7)
    requests = THREE[:batch]
    session = Session(target, drafter=drafter, method=method, sampling=sampling, **{**SHAPE, "batch_size": batch})
    usual = finished(session, requests)
    monkeypatch.setattr(rounds, "tree_kernel_runs", lambda: True)
    monkeypatch.setattr(kv_cache, "on_tpu", lambda: True)
    decode_apart = jax.jit(lambda *args: rounds.decode_rounds.__wrapped__(session.spec, *args))
    state = session.start(session.idle(), list(range(batch)), requests, batch)
    apart = decode_apart(session.weights, state, np.int32(NEW))
    assert apart.tokens.tolist() == usual.tokens.tolist()
    assert apart.commits.tolist() == usual.commits.tolist()
    for row, request in enumerate(requests):
        n = len(request.tokens) + NEW - 1
        for a, b in zip(apart.cache.keys, usual.cache.keys, strict=True):
            np.testing.assert_allclose(a[:, row, ..., :n], b[:, row, ..., :n], rtol=2e-4, atol=2e-5)


def test_a_tree_larger_than_what_can_be_drafted(drafter):
    """A tiny vocabulary: fewer prefixes than nodes; depth limits what a round may accept."""
    target = random_target()
    few = Session(target, drafter=drafter, method="ddtree", draft_tokens=1, tree_budget=60, **SHAPE)
    done = run(few, THREE)
    assert [done[i].tokens for i in range(3)] == [decode(target, r) for r in THREE]
    # 36 of 37 tokens are in the tree; the mask token never is.
    assert all(n in (1, 2) for one in done.values() for n in one.acceptance_lengths[:-1])
    assert sum(n == 2 for one in done.values() for n in one.acceptance_lengths) > 20
