"""Both stages on eight simulated devices: the numbers of one device, and a program that gathers nothing whole."""

import numpy as np
import pytest
import sharded_case

# Float32 sums in another order: a few units in the last place (6e-8) of a sum, over four optimiser steps whose Adam
# update divides by small moments. Measured: at most 9e-7 on any metric or weight, over all meshes here.
BOUND = 5e-6

FAST = {
    "stage1": ({"data": 2, "fsdp": 2, "tensor": 2}, {"remat_layers": True, "anchor_chunk": 2}),
    "stage2": ({"dcn_data": 2, "fsdp": 4, "split_rows": True}, {}),
}
REST = [
    ("stage1", {"data": 2, "fsdp": 4}, {}, {"accumulate": 2}),
    ("stage1", {"fsdp": 8}, {"anchor_chunk": 4}, {"tied": True}),
    ("stage1", {"data": 8}, {}, {"stacked": False}),
    ("stage1", {"dcn_data": 2, "fsdp": 2, "tensor": 2, "split_rows": True}, {}, {}),
    ("stage2", {"data": 2, "fsdp": 4}, {}, {"tied": True, "accumulate": 2}),
    ("stage2", {"data": 2, "fsdp": 2, "tensor": 2}, {"remat_layers": True, "anchor_chunk": 2}, {"stacked": False}),
]


def assert_same_curves(ours: dict, one_device: dict) -> None:
    assert ours.keys() == one_device.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, one_device[name], rtol=BOUND, atol=1e-7, err_msg=name)


@pytest.fixture(scope="module", params=["stage1", "stage2"])
def run(request) -> tuple[str, dict, dict, dict]:
    """(stage, curves on one device, curves on the mesh, facts of the compiled step)."""
    mesh, memory = FAST[request.param]
    same = {"stage": request.param}
    calls = [
        ("curves", {**same, "mesh": {}}),
        ("curves", {**same, "mesh": mesh, "memory": memory}),
        ("compiled_facts", {**same, "mesh": mesh, "memory": memory}),
    ]
    return request.param, *sharded_case.call("many", calls=calls)


def test_eight_devices_train_like_one(run) -> None:
    _, one, eight, _ = run
    assert one["updated"] == [1.0] * 4 and one["loss"][0] != one["loss"][-1]
    assert_same_curves(eight, one)


def test_no_gather_of_logits_or_head_and_no_large_replicated_array(run) -> None:
    stage, _, _, facts = run
    V, D = sharded_case.SHAPE["vocab_size"], sharded_case.SHAPE["hidden_size"]
    assert facts["gathers"], "weights are gathered for use; the reading of the program is broken"
    # The vocabulary's size stands for nothing else in this case: any gathered array with it is logits, table or head.
    assert not [shape for shape in facts["gathers"] if V in shape]
    named = {name for name, _ in facts["replicated"]}
    # Matrices are all spread: what every device holds whole are vectors and counters.
    assert all(size <= 4 * max(D, 64) for _, size in facts["replicated"]), facts["replicated"]
    assert not [name for name in named if name.endswith(("kernel", "embedding", "1/head"))]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mesh", "memory", "options"), REST, ids=str)
def test_every_mesh_trains_like_one_device(stage: str, mesh: dict, memory: dict, options: dict) -> None:
    same = {"stage": stage, **options}
    calls = [("curves", {**same, "mesh": {}}), ("curves", {**same, "mesh": mesh, "memory": memory})]
    one, eight = sharded_case.call("many", calls=calls)
    assert_same_curves(eight, one)
