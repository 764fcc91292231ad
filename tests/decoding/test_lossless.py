"""Every method emits exactly the tokens of plain decoding: methods, temperatures, batches, stops, caps, forced drafts."""

import itertools

import numpy as np
import pytest
from plain_decoding import NEW, REQUESTS, decode, oracle_session, run
from tiny_models import cycle_target, random_drafter

from dstill_jax.decoding.sampling import SamplingConfig
from dstill_jax.decoding.session import Request, Session

pytestmark = pytest.mark.usefixtures("quick_compilation")

METHODS = {
    "autoregressive": ("autoregressive", {}),
    "lookup": ("lookup", {}),
    "dflash": ("dflash", {}),
    "left to right": ("refine", {"order": "left_to_right"}),
    "by confidence": ("refine", {"order": "confidence", "passes": 2, "threshold": 0.3}),
    "small tree": ("ddtree", {"tree_budget": 6}),
    "large tree": ("ddtree", {"tree_budget": 150}),
}
SETTINGS = {
    "greedy": [(0.0, None, None)],
    "sampled": [(0.7, None, None), (1.0, None, None)],
    "filtered": [(0.7, 5, None), (1.0, None, 0.9), (1.3, 8, 0.8)],
}
FAST = {  # every method, every kind of setting; the other pairs are slow tests
    ("greedy", "autoregressive"),
    ("greedy", "lookup"),
    ("greedy", "dflash"),
    ("greedy", "left to right"),
    ("sampled", "dflash"),
    ("filtered", "by confidence"),
    ("sampled", "large tree"),
    ("filtered", "small tree"),
}
_PLAIN: dict = {}


def plain(target, setting) -> list[list[int]]:
    """Plain decoding of all requests; computed once."""
    if setting not in _PLAIN:
        _PLAIN[setting] = [decode(target, request, NEW, *setting) for request in REQUESTS]
    return _PLAIN[setting]


def session_of(target, drafter, method, options, setting, **more) -> Session:
    settings = {"batch_size": 3, "max_prompt_tokens": 32, "max_new_tokens": NEW, "stop_token_ids": []}
    return Session(
        target, drafter=drafter, method=method, sampling=SamplingConfig(*setting), **{**settings, **options, **more}
    )


@pytest.mark.parametrize(
    "kind, name",
    [
        pytest.param(kind, name, marks=[] if (kind, name) in FAST else pytest.mark.slow)
        for kind, name in itertools.product(SETTINGS, METHODS)
    ],
)
def test_seven_requests_through_three_rows_equal_plain_decoding_alone(target, drafter, kind, name):
    """Prompts of 1 to 32 tokens, rows refilled as they finish: nothing depends on method or batch mates."""
    method, options = METHODS[name]
    for setting in SETTINGS[kind]:
        session = session_of(target, drafter, method, options, setting)
        done = run(session, REQUESTS)
        assert [done[i].tokens for i in range(len(REQUESTS))] == plain(target, setting)
        for one in done.values():
            assert sum(one.acceptance_lengths) == len(one.tokens) - 1  # the prefill draws the first
            assert all(1 <= n <= session.spec.proposer.draft_tokens + 1 for n in one.acceptance_lengths)
            assert one.finish_reason == "length"


def test_order_of_requests_does_not_matter(target, drafter):
    session = session_of(target, drafter, "dflash", {}, (0.7, None, None))
    done = run(session, [REQUESTS[i] for i in (4, 2, 6, 0, 5, 1, 3)])
    assert [done[i].tokens for i in range(7)] == plain(target, (0.7, None, None))


@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_fewer_drafted_tokens_than_slots(target, drafter, width):
    session = session_of(target, drafter, "dflash", {"draft_tokens": width}, (0.0, None, None))
    done = run(session, REQUESTS)
    assert [done[i].tokens for i in range(7)] == plain(target, (0.0, None, None))
    assert max(max(one.acceptance_lengths) for one in done.values()) <= width + 1


PATTERN = (0, 3, 4, 1, 2, 4, 4, 0)


@pytest.fixture(scope="module")
def three(target):
    """Three requests of very different lengths, and their texts."""
    requests = [Request(i, REQUESTS[i].tokens, 5) for i in range(3)]
    return requests, plain(target, (0.0, None, None))[:3]


def test_forced_acceptance_commits_exactly_what_was_right(target, three):
    requests, texts = three
    done = run(oracle_session(target, requests, texts, PATTERN, max_new_tokens=NEW, stop_token_ids=[]), requests)
    for row in range(3):
        assert done[row].tokens == texts[row]
        expected, left = [], NEW - 1
        while left:
            committed = min(PATTERN[(len(expected) + row) % len(PATTERN)] + 1, left)
            expected, left = [*expected, committed], left - committed
        assert done[row].acceptance_lengths == expected


def test_each_token_as_the_stop_token_inside_blocks(target, three):
    requests, texts = three
    for stop in sorted(set(texts[1])):
        session = oracle_session(target, requests, texts, (4,), max_new_tokens=NEW, stop_token_ids=[stop])
        done = run(session, requests)
        for row, text in enumerate(texts):
            ends = text.index(stop) + 1 if stop in text else NEW
            assert done[row].tokens == text[:ends]
            assert done[row].finish_reason == ("stop" if stop in text else "length")
            assert sum(done[row].acceptance_lengths) == ends - 1


def test_caps_before_at_and_after_a_stop(target, three):
    requests, texts = three
    first = {token: texts[2].index(token) for token in texts[2]}
    late = sorted(first, key=first.get)[-2:]  # two stop ids; the earlier one counts
    at = min(first[token] for token in late)
    for cap in (1, 2, at, at + 1, at + 2, NEW):
        session = oracle_session(target, requests, texts, (4, 2), max_new_tokens=cap, stop_token_ids=late)
        done = run(session, requests)
        for row, text in enumerate(texts):
            ends = min([text.index(token) + 1 for token in late if token in text], default=99)
            assert done[row].tokens == text[: min(ends, cap)]
            assert done[row].finish_reason == ("stop" if ends <= cap else "length")


def test_stops_and_caps_inside_trees(target, drafter, three):
    """A tree of 150 nodes mostly holds the next token: rounds end in the middle of accepted paths."""
    requests, texts = three
    for stop, cap in ((texts[1][7], NEW), (texts[0][2], NEW), (texts[2][5], 4), (texts[1][0], 1)):
        tree = {"tree_budget": 150, "max_new_tokens": cap, "stop_token_ids": [stop]}
        done = run(session_of(target, drafter, "ddtree", tree, (0.0, None, None)), requests)
        for row, text in enumerate(texts):
            ends = text.index(stop) + 1 if stop in text else 99
            assert done[row].tokens == text[: min(ends, cap)]
            assert done[row].finish_reason == ("stop" if ends <= cap else "length")


def test_no_token_id_has_a_hidden_meaning():
    """A target that must emit id 0, the mask token and the padding token in mid-text."""
    cycle = [3, 0, 7, 1, 5]
    target = cycle_target(cycle, 8, pad_token_id=1)
    drafter = random_drafter(target)
    assert drafter.config.mask_token_id == 7
    requests = [Request(i, [token], 0) for i, token in enumerate(cycle)]
    expected = [[cycle[(i + 1 + n) % 5] for n in range(NEW)] for i in range(5)]
    for method in ("dflash", "ddtree"):
        done = run(session_of(target, drafter, method, {}, (0.0, None, None)), requests)
        assert [done[i].tokens for i in range(5)] == expected
    for one in done.values():  # the mask token is never drafted: it can only be the target's own, last in its round
        ends = np.cumsum(one.acceptance_lengths)
        assert {i for i, token in enumerate(one.tokens) if token == 7 and i} <= set(ends)
