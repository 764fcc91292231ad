"""Whole runs (`run_stage`: load, train, save, export) on eight simulated devices, and moved from one mesh to another."""

from pathlib import Path

import numpy as np
import pytest
import sharded_case

# As in test_simulated_devices.py, plus the scale of the taps, whose forward pass is summed in another order.
BOUND = 1e-5


@pytest.mark.slow
def test_both_stages_run_on_a_mesh_as_on_one_device_and_may_change_meshes(tmp_path: Path) -> None:
    """One run on one device; one on 8, then 4, then one, then 8; every loss and the exported drafters agree."""
    mixed = {"data": 2, "fsdp": 2, "tensor": 2}
    four = {"fsdp": 2, "tensor": 2}
    one = sharded_case.call("whole_runs", 1, folder=str(tmp_path / "one"), mesh={})
    assert one["steps"] == [1, 2, 3, 4, 5, 6]
    folder = str(tmp_path / "several")
    sharded_case.call("whole_runs", 8, folder=folder, mesh=mixed, stop=2)
    sharded_case.call("whole_runs", 4, folder=folder, mesh=four, stop=3)
    sharded_case.call("whole_runs", 1, folder=folder, mesh={}, stop=5)
    moved = sharded_case.call("whole_runs", 8, folder=folder, mesh=mixed)
    eight = sharded_case.call("whole_runs", 8, folder=str(tmp_path / "eight"), mesh=mixed)
    for other in (moved, eight):
        assert other["steps"] == one["steps"]
        for name in ("stage1", "stage2"):
            np.testing.assert_allclose(other[name], one[name], rtol=BOUND, err_msg=name)
        np.testing.assert_allclose(other["weights"], one["weights"], rtol=20 * BOUND, atol=1e-6)
