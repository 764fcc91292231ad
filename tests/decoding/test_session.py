"""Sessions: recorded features, no recompilation, streaming, lookup, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoding import NEW, REQUESTS, WIDTH, decode, oracle_session, run
from tiny_models import random_target

import dstill_jax as dj
from dstill_jax.decoding import rounds
from dstill_jax.decoding.generate import draft_logits, generate, stream
from dstill_jax.decoding.proposers import PromptLookup
from dstill_jax.decoding.sampling import SamplingConfig
from dstill_jax.decoding.session import _PREFILL_TOKENS_CPU, Request, Session, decode_requests
from dstill_jax.decoding.state import DecodeState
from dstill_jax.errors import UserError
from dstill_jax.models import target as target_lib

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = {"batch_size": 3, "max_prompt_tokens": 32, "max_new_tokens": NEW, "stop_token_ids": []}


def test_recorded_features_are_those_of_a_plain_forward_pass(target):
    """Rejected drafts, refused tokens and batch mates leave no trace in them."""
    requests = [Request(i, REQUESTS[i].tokens, 5) for i in range(3)]
    texts = [decode(target, request) for request in requests]
    session = oracle_session(
        target, requests, texts, (0, 3, 4, 1), max_new_tokens=NEW, stop_token_ids=[texts[1][11]], record_taps=(1, 0)
    )
    done = run(session, requests)
    assert 1 < len(done[1].tokens) < NEW == len(done[0].tokens)
    for request in requests:
        tokens = [*request.tokens, *done[request.id].tokens][:-1]
        row = np.zeros((1, 64), np.int32)
        row[0, : len(tokens)] = tokens
        out = jax.jit(target_lib.forward, static_argnames=("config", "tap_ids"))(
            target.config, target.params, row, np.arange(64)[None], tap_ids=(1, 0)
        )
        expected = np.concatenate([out.taps, out.hidden], -1)[0, : len(tokens)]
        features = done[request.id].features
        assert features.dtype == np.float16 and features.shape == expected.shape
        np.testing.assert_allclose(features, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("method", ["autoregressive", "dflash"])
def test_a_shared_prefix_changes_no_token_and_no_feature(target, drafter, method):
    """Its caches, its drafter context and its recorded features are those of the whole prompts."""
    prefix = [7, 3, 11, 5, 2]
    requests = [Request(i, [*prefix, *tail], 5) for i, tail in enumerate(([1], [4, 9, 6], [8, 10, 1, 3, 2, 9, 12]))]
    options = {"method": method, "drafter": drafter, "record_taps": (0, 1), **SHAPE}
    whole, shared = ({c.id: c for c in Session(target, **options, shared_prefix=p).run(requests)} for p in ((), prefix))
    for request in requests:
        a, b = whole[request.id], shared[request.id]
        assert (a.tokens, a.acceptance_lengths) == (b.tokens, b.acceptance_lengths)
        np.testing.assert_allclose(a.features, b.features, rtol=2e-3, atol=2e-3)
    for tokens in ([7, 3, 11, 5], prefix, [1, 2, 3, 4, 5, 6]):
        with pytest.raises(UserError, match="shared prefix"):
            list(Session(target, **SHAPE, shared_prefix=prefix).run([Request(0, tokens)]))


def test_a_long_shared_prefix_is_read_in_parts(target, monkeypatch):
    """As a prompt of its length is: its attention scores would be the square of it."""
    chunks = []
    monkeypatch.setattr("dstill_jax.decoding.session.prefill", lambda *arguments: chunks.append(arguments[-1]))
    long = dataclasses.replace(target, config=dataclasses.replace(target.config, max_position_embeddings=9000))
    Session(long, batch_size=1, max_prompt_tokens=8100, max_new_tokens=8, shared_prefix=[1] * 8000)
    assert chunks == [_PREFILL_TOKENS_CPU]


@pytest.mark.parametrize("method", ["autoregressive", "dflash"])
def test_prompts_longer_than_a_prefill_pass_are_read_in_several(target, drafter, method):
    """Lengths around the multiples of the pass (32 tokens), the last pass overlapping the one before it."""
    random = np.random.default_rng(3)
    requests = [Request(i, random.integers(0, 37, n).tolist(), 5) for i, n in enumerate((1, 32, 33, 44, 43, 31))]
    options = {"batch_size": 4, "max_prompt_tokens": 44, "max_new_tokens": 12, "stop_token_ids": []}
    session = Session(target, drafter=drafter, method=method, record_taps=(0, 1), **options)
    state = session.start(session.idle(), [0, 1, 2, 3], requests[:4], 4)  # 4 rows: 32 tokens of each at a time
    assert state.length.tolist() == [2, 33, 34, 45]
    done = run(session, requests)
    for request in requests:
        expected = decode(target, request, 12)
        assert done[request.id].tokens == expected
        tokens = np.zeros(WIDTH, np.int32)
        tokens[: len(request.tokens) + 11] = [*request.tokens, *expected[:-1]]
        out = target_lib.forward(target.config, target.params, tokens[None], np.arange(WIDTH)[None], tap_ids=(0, 1))
        n = len(request.tokens) + 11
        features = np.concatenate([out.taps, out.hidden], -1)[0, :n]
        np.testing.assert_allclose(done[request.id].features, features, rtol=2e-3, atol=2e-3)


def test_nothing_compiles_after_the_first_request(target, drafter):
    random = np.random.default_rng(0)

    def requests(number):
        return [Request(i, random.integers(0, 37, random.integers(1, 33)).tolist(), i) for i in range(number)]

    def sizes():
        return rounds.prefill._cache_size(), rounds.decode_rounds._cache_size()

    def session(temperature, **changes):
        sampling = SamplingConfig(temperature)
        return Session(target, drafter=drafter, method="dflash", sampling=sampling, **{**SHAPE, **changes})

    run(session(0.9), requests(1))
    warm = sizes()
    for temperature in (0.5, 1.0):
        done = run(session(temperature, max_new_tokens=17, stop_token_ids=[1, 2]), requests(20))
        assert len(done) == 20
    assert sizes() == warm
    shorter = Session(target, drafter=drafter, method="dflash", draft_tokens=2, sampling=SamplingConfig(1.0), **SHAPE)
    run(shorter, requests(2))
    assert sizes() == (warm[0], warm[1] + 1)  # another number of drafted tokens: another round, the same prefill


@pytest.mark.parametrize("method", ["dflash", "refine"])
def test_fewer_drafted_tokens_are_the_first_of_a_whole_block(target, drafter, method):
    """The drafter was trained on whole blocks: without the masks behind them the first slots are guessed worse."""
    drafts = {}
    for width in (2, 4):
        options = {"passes": 2, "order": "left_to_right"} if method == "refine" else {}
        session = Session(target, drafter=drafter, method=method, draft_tokens=width, **options, **SHAPE)
        state = session.start(session.idle(), [0, 1], [Request(i, [3, 1, 4, 1 + i], i) for i in range(2)], 2)
        drafts[width] = session.spec.proposer.propose(session.spec, session.weights, state)[:2]
    np.testing.assert_array_equal(drafts[2][:, :1], drafts[4][:, :1])
    if method == "dflash":
        np.testing.assert_array_equal(drafts[2], drafts[4][:, :2])


def lookup_by_loop(text: list[int], width: int, max_ngram: int) -> list[int]:
    """Copies what followed the latest earlier occurrence of the longest n-gram at the end of `text`."""
    for n in range(min(max_ngram, len(text)), 0, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[len(text) - n :]:
                grown = list(text)
                for i in range(width):
                    grown.append(grown[end + 1 + i])  # may copy what it has just written
                return grown[len(text) :]
    return [text[-1]] * width


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_lookup_copies_what_followed_the_latest_longest_match(max_ngram):
    random = np.random.default_rng(max_ngram)
    texts = [random.integers(0, 3, random.integers(1, 24)).tolist() for _ in range(60)]
    texts += [[5], [5, 5], [1, 2, 3], [1, 2, 1, 2], [0, 0, 0, 4, 0, 0]]
    tokens = np.zeros((len(texts), 32), np.int32)  # stale zeros past each text must not match
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    blank = dict.fromkeys(DecodeState._fields)
    state = DecodeState(**{**blank, "tokens": jnp.asarray(tokens), "length": jnp.asarray([len(t) for t in texts])})
    drafts = jax.jit(lambda state: PromptLookup(6, max_ngram).propose(None, None, state))(state)
    for text, draft in zip(texts, np.asarray(drafts).tolist(), strict=True):
        assert draft == lookup_by_loop(text, 6, max_ngram), text


def test_generate_keeps_the_order_of_prompts_and_its_own_counts(target):
    prompts = [request.tokens for request in REQUESTS[:3]]
    out = generate(target, prompts, "lookup", max_new_tokens=NEW, stop_token_ids=[])
    assert out.tokens == [decode(target, Request(i, p)) for i, p in enumerate(prompts)]
    assert out.stats["rounds"] == sum(map(len, out.acceptance_lengths))
    assert out.stats["tau_pooled"] == pytest.approx(3 * (NEW - 1) / out.stats["rounds"])
    assert out.stats["tau_mean"] == pytest.approx(np.mean([np.mean(n) for n in out.acceptance_lengths]))
    two_at_a_time = generate(target, prompts, "lookup", max_new_tokens=NEW, stop_token_ids=[], batch_size=2)
    assert (two_at_a_time.tokens, two_at_a_time.acceptance_lengths) == (out.tokens, out.acceptance_lengths)
    once = generate(target, prompts, "lookup", max_new_tokens=1, stop_token_ids=[])
    assert once.tokens == [tokens[:1] for tokens in out.tokens]
    assert once.acceptance_lengths == [[], [], []] and once.stats["tau_mean"] == 1


def test_a_stream_is_the_same_text_in_pieces(target):
    options = {"method": "lookup", "max_new_tokens": NEW, "stop_token_ids": []}
    pieces = list(stream(target, REQUESTS[1].tokens, rounds_per_call=2, **options))
    assert len(pieces) > 2 and len(pieces[0][0]) == 1 and pieces[0][1] == []
    assert [t for tokens, _ in pieces for t in tokens] == decode(target, Request(0, REQUESTS[1].tokens))
    assert all(sum(lengths) == len(tokens) and len(lengths) <= 2 for tokens, lengths in pieces[1:])


def test_the_targets_own_stop_tokens_are_the_default(target):
    text = decode(target, REQUESTS[1])
    stopping = dataclasses.replace(target, config=dataclasses.replace(target.config, eos_token_ids=(text[4],)))
    session = Session(stopping, **{**SHAPE, "stop_token_ids": None})
    assert session.weights.stop_token_ids.tolist() == [text[4]] + [-1] * 7
    assert Session(stopping, **SHAPE).weights.stop_token_ids.tolist() == [-1] * 8


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"method": "magic"}, "method='magic'.*autoregressive, lookup, dflash, refine, ddtree"),
        ({"passes": 3}, "method 'dflash' does not read passes"),
        ({"method": "autoregressive", "passes": 3}, "method 'autoregressive' does not read passes"),
        ({"method": "refine", "passes": 5}, "passes=5 is more than the 4 slots"),
        ({"method": "dflash", "threshold": 0.5}, "does not read threshold"),
        ({"method": "refine", "threshold": 0.5}, "threshold=0.5 is read by order='confidence' or 'prefix' only"),
        ({"method": "refine", "order": "quota", "threshold": 0.5}, "threshold=0.5.*this is 'quota'"),
        ({"method": "lookup", "draft_tokens": 0}, "draft_tokens=0"),
        ({"method": "lookup", "max_ngram": 0}, "max_ngram=0"),
        ({"method": "dflash", "draft_tokens": 5}, "draft_tokens=5.*block_size - 1 = 4"),
        ({"method": "dflash", "draft_tokens": 0}, "draft_tokens=0"),
        ({"method": "refine", "passes": 0}, "passes=0"),
        ({"method": "refine", "order": "best"}, "order='best'"),
        ({"method": "dflash", "drafter": None}, "needs a drafter"),
        ({"method": "ddtree", "drafter": None}, "needs a drafter"),
        ({"method": "ddtree", "tree_budget": 0}, "tree_budget=0.*1 and 1023"),
        ({"method": "ddtree", "tree_budget": 1024}, "tree_budget=1024"),
        ({"method": "ddtree", "tree_budget": 2.5}, "tree_budget=2.5.*whole"),
        ({"method": "ddtree", "passes": 2}, "does not read passes"),
        ({"method": "dflash", "tree_budget": 4}, "does not read tree_budget"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 500}, "prompt of 32 tokens plus max_new_tokens=500.*512"),
        ({"stop_token_ids": range(9)}, "9 stop tokens"),
        ({"stop_token_ids": 2}, r"stop_token_ids=2 must be a list of token ids, such as \[2\]"),
        ({"method": "dflash", "record_taps": (1,)}, r"record_taps=\(1,\)"),
    ],
)
def test_sessions_that_cannot_be_are_refused_by_argument(target, drafter, changes, message):
    with pytest.raises(UserError, match=message):
        Session(target, **{**SHAPE, "drafter": drafter, **changes})


@pytest.mark.parametrize(
    "tokens, message",
    [([], "prompt 3 is empty"), ([1, 37], "token id 37"), ([-1], "token id -1"), ([1] * 33, "33 tokens")],
)
def test_requests_that_cannot_be_are_refused(target, tokens, message):
    with pytest.raises(UserError, match=message):
        list(decode_requests(target, [Request(3, tokens)], **SHAPE))


def test_a_long_prompt_never_overruns_the_cache(target):
    """32 tokens were promised; more would leave no room for the answer."""
    session = Session(target, **SHAPE)
    assert session.capacity >= 32 + NEW + 1
    with pytest.raises(UserError, match="max_prompt_tokens=32"):
        session.check(Request(0, [1] * 60))


@pytest.mark.parametrize("prompts", [[], "text", [[1], []], [1, 2, 3], np.arange(3)])
def test_prompts_must_be_lists_with_something_in_them(target, prompts):
    with pytest.raises(UserError, match="prompt"):
        generate(target, prompts)


def test_a_drafter_of_another_target_is_refused(target, drafter):
    for other, message in (
        (random_target(vocab_size=41), "vocab_size=37 but the target has vocab_size=41"),
        (random_target(hidden_size=24), "hidden_size=16 but the target has hidden_size=24"),
        (random_target(num_layers=3), "num_target_layers=2 but the target has num_layers=3"),
    ):
        with pytest.raises(UserError, match=message):
            Session(other, drafter=drafter, method="dflash", **SHAPE)
    stranger = dataclasses.replace(drafter, target_fingerprint="abc")
    with pytest.raises(UserError, match="trained on target abc"):
        Session(target, drafter=stranger, method="dflash", **SHAPE)
    Session(target, drafter=dataclasses.replace(drafter, target_fingerprint="random-0"), method="dflash", **SHAPE)


@pytest.mark.parametrize(
    "prompt, block, message",
    [
        ([1.7], [1], "token id=1.7 must be a whole number"),
        ([], [1, 2], "prompt"),
        ([1], [], "block"),
        ([1], [1] * 6, "block_size=5"),
        ([37], [1], "37"),
        ([1], [-2], "-2"),
    ],
)
def test_draft_logits_refuses_what_it_cannot_score(target, drafter, prompt, block, message):
    with pytest.raises(UserError, match=message):
        draft_logits(target, drafter, prompt, block)


def test_the_public_names_are_these():
    assert dj.generate is generate and dj.draft_logits is draft_logits
