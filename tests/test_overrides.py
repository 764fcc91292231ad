"""FIELD=VALUE of the command line."""

import pytest

from configs.qwen3_8b_stage1 import CONFIG
from configs.qwen3_8b_stage2 import CONFIG as STAGE_TWO
from dstill_jax.errors import UserError
from dstill_jax.overrides import override


def test_nested_fields_are_reached_and_values_are_literals_or_words() -> None:
    config = override(
        STAGE_TWO,
        ["objective.curriculum.kind=full", "objective.loss.rest.hard_ce=1", "out=elsewhere", "data=('a', 'b')"],
    )
    assert config.objective.curriculum.kind == "full"
    assert config.objective.loss.rest.hard_ce == 1.0 and isinstance(config.objective.loss.rest.hard_ce, float)
    assert (config.out, config.data) == ("elsewhere", ("a", "b"))
    assert config.batches == STAGE_TWO.batches
    assert override(CONFIG, ["optimizer.clip_norm=None"]).optimizer.clip_norm is None


@pytest.mark.parametrize("text, value", [("false", False), ("False", False), ("true", True), ("True", True)])
def test_truth_values_are_those_of_python_or_of_json(text: str, value: bool) -> None:
    assert override(CONFIG, [f"memory.remat_layers={text}"]).memory.remat_layers is value


@pytest.mark.parametrize("larger", [True, False])
def test_the_order_does_not_matter(larger: bool) -> None:
    """Each of the two alone is refused: only together do the rows divide over the mesh."""
    both = ["batches.batch_size=32", "mesh.dcn_data=2"] if larger else ["batches.batch_size=4", "mesh.fsdp=4"]
    assert override(CONFIG, both) == override(CONFIG, both[::-1])
    with pytest.raises(UserError, match="does not divide"):
        override(CONFIG, [both[larger]])


def test_the_later_of_two_values_counts() -> None:
    assert override(CONFIG, ["mesh.fsdp=8", "mesh.fsdp=16"]) == CONFIG


@pytest.mark.parametrize(
    "assignments, message",
    [
        (["objective.loss.rest.teacher_k=1"], "objective.loss.rest.teacher_k: TermWeights.*did you mean 'teacher_kl'"),
        (["objective.curriculum.kind=magic"], "CurriculumConfig.kind='magic'"),
        (["objective.loss=1"], "objective.loss is a group of fields; set one of first, rest"),
        (["out.where=1"], "out.where: out is .* here, which has no fields of its own"),
        (["out"], "'out' must look like FIELD=VALUE"),
        (["memory.remat_layers=yes"], "memory.remat_layers='yes' must be bool; it is True now"),
        (["mesh.fsdp=1.5"], "mesh.fsdp=1.5 must be int; it is 16 now"),
        (["mesh=1", "mesh.fsdp=2"], "mesh.fsdp: mesh is set as a whole, too"),
        (["mesh.fsdp=2", "mesh=1"], "mesh: fields of mesh are set, too"),
    ],
)
def test_what_cannot_be_set_is_named(assignments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(STAGE_TWO, assignments)
