"""`measure` on a tiny target: what is timed alone and what is decoded in batches."""

from types import SimpleNamespace

import jax
import pytest
from tiny_models import random_drafter, random_target

from dstill_jax.decoding.generate import generate
from dstill_jax.errors import UserError
from dstill_jax.evaluation.measure import Arm, EvaluationConfig, device_name, measure

PROMPTS = [[5, 9, 7], [11, 12, 13, 14, 15], [3, 30]]


@pytest.fixture(scope="module")
def arms():
    target = random_target()
    drafter = random_drafter(target)
    return target, [
        Arm("plain", "autoregressive"),
        Arm("drafted", "dflash", drafter, "random", {"draft_tokens": 3}, training_steps=7),
    ]


def test_all_prompts_are_decoded_and_the_first_ones_timed(arms, quick_compilation) -> None:
    target, arms = arms
    told = []
    config = EvaluationConfig(max_new_tokens=12, stop_token_ids=(), batch_size=2, timed_prompts=2)
    result, completions = measure(
        target, arms, PROMPTS, config, prompts_name="three", report=lambda *progress: told.append(progress)
    )
    plain, drafted = result.arms
    expected = generate(target, PROMPTS, max_new_tokens=12, stop_token_ids=())
    assert [c.tokens for c in completions["plain"]] == [c.tokens for c in completions["drafted"]] == expected.tokens
    assert result.identical_outputs(drafted) == 3
    assert (plain.tokens, plain.drafted_length, drafted.drafted_length) == ((12,) * 3, 0, 3)
    assert [len(arm.seconds) for arm in result] == [2, 2] and min(drafted.seconds) > 0
    assert result.speedup(drafted).prompts == 2
    assert result.metadata.batch_size == 2
    assert told[-1] == (6, 6)  # two arms: two prompts alone and one in a batch


def test_nothing_is_timed_when_nothing_is_asked_for(arms, quick_compilation) -> None:
    target, arms = arms
    config = EvaluationConfig(max_new_tokens=12, stop_token_ids=(), batch_size=2, timed_prompts=0)
    result, _ = measure(target, arms[:1], PROMPTS, config, prompts_name="three")
    assert result.arms[0].seconds is None and result.arms[0].tokens_per_second is None


def test_an_arm_that_cannot_be_is_refused_before_any_decodes(arms) -> None:
    target, arms = arms
    wrong = Arm("a tree", "ddtree", arms[1].drafter, options={"tree_budget": 5000})
    config = EvaluationConfig(max_new_tokens=12, timed_prompts=0)
    with pytest.raises(UserError, match="tree_budget=5000"):
        measure(target, [*arms, wrong], PROMPTS, config, prompts_name="", report=lambda *_: pytest.fail("decoded"))


def test_responses_without_a_round_leave_nothing_to_measure(arms, quick_compilation) -> None:
    target, arms = arms
    with pytest.raises(UserError, match="max_new_tokens=1 leaves nothing to measure.*at least 2"):
        EvaluationConfig(max_new_tokens=1)
    first = [out[0] for out in generate(target, PROMPTS, max_new_tokens=1, stop_token_ids=()).tokens]
    config = EvaluationConfig(max_new_tokens=4, stop_token_ids=tuple(set(first)), timed_prompts=0)
    with pytest.raises(UserError, match="0 of 3 responses of arm 'plain' go past their first token"):
        measure(target, arms[:1], PROMPTS, config, prompts_name="three")


def test_one_prompt_and_equal_names_are_refused(arms) -> None:
    target, arms = arms
    with pytest.raises(UserError, match="at least 2 prompts, got 1"):
        measure(target, arms, PROMPTS[:1], EvaluationConfig(), prompts_name="one")
    with pytest.raises(UserError, match="arms need names of their own"):
        measure(target, arms[:1] * 2, PROMPTS, EvaluationConfig(), prompts_name="twice")


def test_the_device_is_the_one_that_decodes_and_not_all_of_the_job(monkeypatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="tpu", device_kind="TPU v5e")] * 8)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert device_name() == "1 x TPU v5e"
