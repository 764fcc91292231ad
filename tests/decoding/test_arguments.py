"""What `generate` and `Session` make of their arguments, and of JAX's process-wide settings."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dstill_jax.decoding import rounds as rounds_lib
from dstill_jax.decoding.generate import encode_prompts, generate, stream
from dstill_jax.decoding.sampling import Draw, SamplingConfig, filter_logits, position_noise
from dstill_jax.decoding.session import Request, Session
from dstill_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("quick_compilation")

METHODS = {"autoregressive": {}, "lookup": {}, "dflash": {}, "ddtree": {"tree_budget": 5}, "refine": {"passes": 2}}


@pytest.mark.parametrize(
    "prompts, message",
    [
        ("a text", "non-empty list"),
        ([], "non-empty list"),
        ((x for x in [[1]]), "non-empty list"),
        ([1, 2, 3], "prompt 0 is the number 1"),
        (jnp.array([1, 2, 3]), "prompt 0 is the number 1"),
        ([[1], {"role": "user", "content": "x"}], "prompt 1 is a chat message; apply the tokenizer's chat template"),
        ([[{"role": "user", "content": "x"}]], "prompt 0 is a chat message"),
        ([None], "prompt 0 is of type NoneType"),
        ([b"\x01\x02"], "prompt 0 is of type bytes"),
        ([[1.7, 2.2]], "a token of prompt 0=1.7 must be a whole number"),
        ([np.array([1.0])], "a token of prompt 0=1.0 must be a whole number"),
        ([["1"]], "a token of prompt 0='1' must be a whole number"),
        ([[]], "prompt 0 is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1], [99]], "prompt 1 has token id 99, outside the vocabulary of 37"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused(target, prompts, message, monkeypatch):
    monkeypatch.setattr(Session, "run", lambda *_, **__: pytest.fail("something was decoded"))
    with pytest.raises(UserError, match=message):
        generate(target, prompts)


def test_arrays_are_prompts(target):
    assert encode_prompts(target, np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert encode_prompts(target, [jnp.array([1, 2]), (3, np.int32(4))]) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": None}, "seed=None must be a whole number"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"temperature": None}, "temperature=None must be a number"),
        ({"temperature": "0.7"}, "temperature='0.7' must be a number"),
        ({"top_k": 2.5}, "top_k=2.5 must be a whole number"),
        ({"top_p": "a"}, "top_p='a' must be a number"),
        ({"batch_size": None}, "batch_size=None must be a whole number"),
        ({"drafter": "folder"}, "drafter a str; load them first"),
        ({"target": "tiny"}, "target is a str.*load them first"),
    ],
)
def test_arguments_of_another_type_are_refused(target, changes, message):
    with pytest.raises(UserError, match=message):
        generate(**{"target": target, "prompts": [[1, 2]], **changes})


def test_a_stream_needs_a_round_at_a_time(target):
    with pytest.raises(UserError, match="rounds_per_call=0 must be at least 1"):
        next(stream(target, [1, 2], rounds_per_call=0))


def test_a_drafter_is_used_when_it_is_given(target, drafter):
    shape = {"batch_size": 1, "max_prompt_tokens": 8, "max_new_tokens": 4}
    assert Session(target, drafter=drafter, **shape).spec.proposer.draft_tokens == 4
    assert Session(target, **shape).spec.proposer.draft_tokens == 0


def test_methods_of_one_drafter_share_the_prefill_whatever_they_draft(target, drafter):
    shape = {"batch_size": 1, "max_prompt_tokens": 32, "max_new_tokens": 28}
    sessions = [Session(target, drafter=drafter, draft_tokens=width, **shape) for width in (1, 3, 4)]
    assert len({session.capacity for session in sessions}) == 1


def test_prompts_of_any_length_share_few_shapes(target):
    long = dataclasses.replace(target, config=dataclasses.replace(target.config, max_position_embeddings=4096))
    lengths = range(1, 2000)
    rooms = [Session(long, batch_size=1, max_prompt_tokens=n, max_new_tokens=1).capacity for n in lengths]
    assert all(n + 2 <= room <= max(n + 33, 1.25 * (n + 2) + 1) for n, room in zip(lengths, rooms, strict=True))
    assert len(set(rooms)) <= 20


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def test_the_default_kind_of_random_keys_changes_no_draw():
    keys, places = np.asarray([[1, 2], [3, 4]], np.uint32), jnp.arange(6).reshape(2, 3)
    request, noise = Request(3, [1], seed=5).key_data(), position_noise(keys, places, 7)
    with setting("jax_default_prng_impl", "rbg"):
        assert Request(3, [1], seed=5).key_data().tolist() == request.tolist()
        np.testing.assert_array_equal(position_noise(keys, places, 7), noise)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.0, 3, 0.9)], ids=["greedy", "sampled"])
def test_rounds_are_traced_with_64_bit_numbers_switched_on(target, drafter, method, sampling):
    """Arrays that exist keep their types then; those that are made on the way become 64 bits wide."""
    needs = drafter if method in ("dflash", "ddtree", "refine") else None
    shape = {"batch_size": 2, "max_prompt_tokens": 8, "max_new_tokens": 4}
    session = Session(target, drafter=needs, method=method, sampling=sampling, **shape, **METHODS[method])
    state = session.idle()
    with setting("jax_enable_x64", True):
        out = rounds_lib.decode_rounds.eval_shape(session.spec, session.weights, state, np.int32(3))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


def test_both_zeros_are_one_number_for_a_filter():
    draw = Draw.of(SamplingConfig(1.0, top_k=1))
    found = jax.jit(filter_logits)(jnp.array([-0.0, 0.0, -1.0]), draw)
    assert found.tolist() == [0, 0, -np.inf]
