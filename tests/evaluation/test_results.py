"""Results: computed figures, JSON there and back, and arms that must not be compared."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from evaluation_samples import PROMPTS, PROMPTS_HASH, make_arm

from dstill_jax.errors import UserError
from dstill_jax.evaluation import (
    EvaluationResult,
    MethodResult,
    current_commit,
    digest_tokens,
    environment,
    hash_prompts,
    installed_versions,
    speedup,
    tau_change,
    tau_pooled_change,
)


def test_figures_follow_from_the_per_prompt_lists(result):
    a1, a4 = result.arm("A1 <b>"), result.arm("A4")
    assert a1.tau_mean == a1.tau_pooled == 2
    assert a4.tau_mean == (3 + 4 + 4 + 2.5) / 4
    assert a4.tau_pooled == 28 / 9
    assert a4.rounds == (2, 2, 1, 4)
    assert a1.tokens_per_second == 2
    assert result.speedup(a1).value == 2
    assert result.speedup(a4).value == pytest.approx(28 / 9)
    assert tau_change(a4, a1).value == pytest.approx(100 * (3.375 / 2 - 1))
    assert tau_pooled_change(a4, a1).value == pytest.approx(100 * (28 / 18 - 1))
    assert result.identical_outputs(a1) == 4


def test_no_speedup_without_a_clock_or_against_itself(result):
    assert result.speedup(result.arm("untimed")) is None
    assert result.speedup(result.arm("autoregressive")) is None
    assert result.identical_outputs(result.arm("untimed")) is None


def test_json_round_trip_keeps_everything(result, tmp_path):
    path = result.save(tmp_path / "new" / "result.json")
    assert EvaluationResult.load(path) == result
    assert EvaluationResult.load(path).to_json() == path.read_text()
    document = json.loads(path.read_text())
    assert document["version"] == 1
    assert "bonus token included" in document["definitions"]["tau"]
    arm = document["arms"][2]
    assert arm["acceptance_lengths"] == [[4, 2], [4, 4], [4], [4, 1, 1, 4]]
    assert arm["summary"]["tau_pooled"]["value"] == 28 / 9
    assert arm["summary"]["identical_outputs"] == 4
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.update(format="other"), "not an evaluation"),
        (lambda d: d.pop("metadata"), "'metadata' must be an object"),
        (lambda d: d["arms"][1].pop("tokens"), r"'arms\[1\]' lacks tokens"),
        (lambda d: d["arms"][1].update(speed=3), "unknown fields speed"),
        (lambda d: d["arms"][1].update(acceptance_lengths=5), "wrong type"),
        (lambda d: d["arms"][1]["seconds"].append(1.0), "entries for"),
        (lambda d: d["arms"][1].update(prompts_hash="0" * 64), "evaluated on other prompts"),
        (lambda d: d["metadata"].update(thinking="maybe"), "one of on, off"),
        (lambda d: d["metadata"].update(prompt_count=1), "at least 2 prompts"),
    ],
)
def test_damaged_files_are_refused_by_name(result, tmp_path, change, words):
    document = json.loads(result.to_json())
    change(document)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=words) as error:
        EvaluationResult.load(path)
    assert "damaged.json" in str(error.value)


def test_unreadable_files_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"missing\.json"):
        EvaluationResult.load(tmp_path / "missing.json")
    (tmp_path / "cut.json").write_text('{"format": ')
    with pytest.raises(UserError, match=r"cut\.json is not JSON"):
        EvaluationResult.load(tmp_path / "cut.json")


def test_arms_on_different_prompts_are_not_compared(result):
    a1 = result.arm("A1 <b>")
    other = dataclasses.replace(a1, name="other", prompts_hash=hash_prompts([[1, 2, 3, 4]] * 4))
    for compare in (tau_change, tau_pooled_change, speedup):
        with pytest.raises(UserError, match="different prompts"):
            compare(other, a1)
    with pytest.raises(UserError, match="other prompts"):
        EvaluationResult(result.metadata, (a1, other))


@pytest.mark.parametrize("name, value", [("top_k", 5), ("top_p", 0.5)])
def test_arms_under_different_filters_are_not_compared(result, name, value):
    a1 = result.arm("A1 <b>")
    filtered = dataclasses.replace(a1, name="filtered", **{name: value})
    with pytest.raises(UserError, match=f"at {name}={value} and None"):
        tau_change(filtered, a1)


def test_arms_at_different_temperatures_are_not_compared(result):
    a1 = result.arm("A1 <b>")
    warm = dataclasses.replace(a1, name="warm", temperature=1.0)
    with pytest.raises(UserError, match=r"temperature=1\.0 and 0\.0"):
        tau_change(warm, a1)
    assert EvaluationResult(result.metadata, (*result.arms, warm)).speedup(warm) is None


def test_each_arm_has_the_baseline_that_was_drawn_as_it_was(result):
    plain, a1 = result.arms[:2]
    cut = [dataclasses.replace(arm, name=f"{arm.name} cut", temperature=1.0, top_p=0.9) for arm in (plain, a1)]
    warm = dataclasses.replace(plain, name="warm", temperature=1.0)
    found = EvaluationResult(result.metadata, (plain, a1, warm, *cut))
    assert [found.baseline(arm).name for arm in found] == [plain.name, plain.name, "warm", cut[0].name, cut[0].name]
    assert found.speedup(cut[1]) == found.speedup(a1)


def test_the_token_of_the_prefill_may_stand_outside_the_rounds():
    rounds = [[2], [2], [2], []]
    arm = MethodResult("x", "dflash", 3, PROMPTS_HASH, tokens=(3, 3, 3, 1), acceptance_lengths=rounds)
    assert arm.tau_mean == 2 and arm.tau_interval().prompts == 3


def test_the_token_of_the_prefill_is_not_in_the_speeds():
    # Every response has one token more than its rounds: the prefill's. Rounds of the timed three made 5 + 4 + 0 tokens.
    def arm(name, method, rounds, seconds):
        tokens = [1 + sum(response) for response in rounds]
        return MethodResult(name, method, 3, PROMPTS_HASH, tokens, rounds, seconds)

    plain = arm("plain", "autoregressive", [[1] * 5, [1] * 4, [], [1] * 3], [10.0, 8.0, 0.0])
    drafted = arm("drafted", "dflash", [[3, 2], [4], [], [2, 1]], [2.0, 1.0, 0.0])
    assert plain.tokens == drafted.tokens == (6, 5, 1, 4)
    assert (plain.tokens_per_second, drafted.tokens_per_second) == (9 / 18, 9 / 3)
    faster = speedup(drafted, plain)
    assert (faster.value, faster.prompts) == (pytest.approx((18 / 9) / (3 / 9)), 3)
    # With fewer tokens counting the prefill's would show in the speed-up too: 6 of them for 3 that rounds made.
    short = arm("short", "dflash", [[2], [1], [], [1]], [2.0, 1.0, 0.0])
    assert short.tokens_per_second == 3 / 3
    assert speedup(short, plain).value == pytest.approx((18 / 9) / (3 / 3))


def test_an_arm_without_a_timed_round_has_no_speed():
    def arm(name, method, seconds):
        return MethodResult(name, method, 1, PROMPTS_HASH, (1, 1, 3, 3), [[], [], [1, 1], [2]], seconds)

    silent, plain = arm("silent", "dflash", [0.5, 0.5]), arm("plain", "autoregressive", [1.0, 1.0, 2.0, 2.0])
    assert silent.tokens_per_second is None
    assert plain.tokens_per_second == 4 / 6
    assert speedup(silent, plain) is None and speedup(plain, silent) is None


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"rounds": [[9]] * 4}, r"arm 'x': acceptance_lengths.*1\.\.4"),
        ({"seconds": [1.0] * 5}, "entries for"),
        ({"seconds": [1.0, -1.0, 1.0, 1.0]}, "finite and >= 0"),
        ({"drafted_length": -1}, ">= 0"),
        ({"name": ""}, "name must not be empty"),
    ],
)
def test_bad_arms_are_refused(fields, words):
    values = {"name": "x", "rounds": [[2]] * 4, "seconds": None} | fields
    with pytest.raises(UserError, match=words):
        make_arm(**values)


def test_tokens_and_rounds_must_agree():
    with pytest.raises(UserError, match="its rounds committed 2"):
        MethodResult("x", "dflash", 3, PROMPTS_HASH, tokens=(7,), acceptance_lengths=[[2]])


def test_duplicate_and_unknown_arm_names_are_refused(result):
    with pytest.raises(UserError, match="unique names"):
        EvaluationResult(result.metadata, (result.arms[0], result.arms[0]))
    with pytest.raises(UserError, match="no arm 'A9'.*A4"):
        result.arm("A9")


def test_prompt_hash_sees_every_id_their_order_and_the_borders():
    variants = [PROMPTS, PROMPTS[::-1], [[1, 2], [3], *PROMPTS[1:]], [[12, 3], *PROMPTS[1:]], [[1, 23], *PROMPTS[1:]]]
    assert len({hash_prompts(prompts) for prompts in variants}) == len(variants)
    assert digest_tokens([1, 2]) != digest_tokens([12])
    with pytest.raises(UserError, match="at least one prompt"):
        hash_prompts([])


def test_environment_is_described_without_a_device():
    assert "python" in installed_versions(["numpy", "no-such-package"])


def test_the_commit_is_that_of_the_checkout_and_says_when_files_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # no signing, no hooks of whoever runs this

    def git(*arguments):
        command = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.com", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    tracked, untracked = tmp_path / "tracked.py", tmp_path / "untracked.py"
    tracked.write_text("1\n")
    assert current_commit(tracked) is None  # no checkout yet
    git("init")
    git("add", "tracked.py")
    git("commit", "-m", "one")
    commit = git("log", "-1", "--format=%H")
    assert len(commit) == 40 and current_commit(tracked) == commit
    untracked.write_text("2\n")
    assert current_commit(tracked) == commit
    assert current_commit(untracked) is None  # installed inside somebody else's checkout
    tracked.write_text("3\n")
    assert current_commit(tracked) == commit + "-dirty"
    assert current_commit() == current_commit(environment.__file__)


def test_import_loads_no_drawing_library_and_no_tokenizer():
    code = (
        "import sys, dstill_jax.evaluation; bad = {'matplotlib', 'rich', 'transformers'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
