"""Every file in configs/ is a run: it loads, says how to run it, and has a tiny twin."""

import ast
from pathlib import Path

import pytest

from dstill_jax.cli import main
from dstill_jax.commands import load_config, load_runs
from dstill_jax.distill.config import StageTwoConfig
from dstill_jax.errors import UserError
from dstill_jax.runs import RunConfig

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_config_loads_and_explains_itself(path: Path) -> None:
    for config, tiny in zip(*(load_runs(str(path), name, []) for name in ("CONFIG", "TINY")), strict=True):
        assert tiny.train.total_steps < config.train.total_steps
        assert (tiny.stage, config.target != "tiny", tiny.target) == (config.stage, True, "tiny")
    description = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"dstill train configs/{path.name}" in description
    for word in ("Hardware:", "Command:"):
        assert word in description


def test_stage_two_starts_from_the_drafter_of_stage_one() -> None:
    first, second = (
        load_config(str(FILES[0].with_name(f"smollm2_{s}.py")), "CONFIG", []) for s in ("stage1", "stage2")
    )
    assert second.start_from == f"{first.out}/drafter"
    assert isinstance(second.objective, StageTwoConfig)
    assert second.objective.loss.first.teacher_kl == 0  # slot 1 keeps the text's own token


def variants() -> list[str]:
    """The lines of the code block in docs/distillation.md: a name, then overrides."""
    text = (Path(__file__).parents[1] / "docs" / "distillation.md").read_text()
    return text.split("```")[1].strip().splitlines()


@pytest.mark.parametrize("line", variants(), ids=lambda line: line.partition("  ")[0])
def test_every_documented_variant_of_stage_two_is_a_config(line: str) -> None:
    path = str(FILES[0].with_name("smollm2_stage2.py"))
    overrides = line.partition("  ")[2].split()
    assert overrides
    for name in ("CONFIG", "TINY"):
        changed = load_config(path, name, overrides)
        assert changed != load_config(path, name, []) and isinstance(changed.objective, StageTwoConfig)


def test_halving_runs_are_tied_to_each_other() -> None:
    path = str(FILES[0].with_name("smollm2_halving.py"))
    first, second = load_runs(path, "CONFIG", ["train.total_steps=7"])
    assert (first.objective.passes, first.objective.student_passes) == (4, 2)
    assert (second.objective.passes, second.objective.student_passes) == (2, 1)
    assert second.start_from == f"{first.out}/drafter" and second.teacher is None
    assert (first.train.total_steps, second.train.total_steps) == (7, 7)
    for override in ("out=elsewhere", "checkpoints=gs://bucket", "teacher=other", "objective.passes=3"):
        with pytest.raises(UserError, match=f"{override.partition('=')[0]} ties the 2 runs"):
            load_runs(path, "CONFIG", [override])
    with pytest.raises(UserError, match="2 runs, and one is wanted"):
        load_config(path, "CONFIG", [])


def test_train_goes_through_the_runs_of_a_file_in_turn(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    started: list[RunConfig] = []

    def run_stage(config: RunConfig, **_: object) -> Path:
        started.append(config)
        return Path(config.out) / "drafter"

    monkeypatch.setattr("dstill_jax.runs.run_stage", run_stage)
    monkeypatch.setattr("dstill_jax.commands.resolve_target", lambda name: f"where/{name}/is")
    path = str(FILES[0].with_name("smollm2_halving.py"))
    assert main(["train", path, "--tiny"]) == 0
    assert [(run.out, run.target) for run in started] == [
        ("runs/tiny/halving/round1", "where/tiny/is"),
        ("runs/tiny/halving/round2", "where/tiny/is"),
    ]
    assert capsys.readouterr().out.splitlines() == [f"{run.out}/drafter" for run in started]
