"""Every file in configs/ is a run: it loads, says how to run it, and has a tiny twin."""

import ast
from pathlib import Path

import pytest

from dstill_jax.commands import load_config
from dstill_jax.distill.config import StageTwoConfig

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_config_loads_and_explains_itself(path: Path) -> None:
    config, tiny = (load_config(str(path), name, []) for name in ("CONFIG", "TINY"))
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
