"""Weights onto eight simulated devices: the same numbers, each byte read once, and no whole copy on the host."""

from pathlib import Path

import pytest
import sharded_case

MB = 2**20


def test_a_target_on_eight_devices_is_the_target(tmp_path: Path) -> None:
    folder = str(tmp_path)
    calls = [
        ("loaded_alike", {"folder": folder, "mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "stacked": True}),
        # A device's part of a row is 16 bytes: whole rows are read and cut for all devices.
        ("loaded_alike", {"folder": folder, "mesh": {"fsdp": 8}, "stacked": False}),
        ("loaded_alike", {"folder": folder, "mesh": {"fsdp": 8}, "stacked": True}),
        # 4096 bytes: each part is read by itself.
        ("loaded_alike", {"folder": folder, "mesh": {"data": 4, "fsdp": 2}, "stacked": True, "hidden_size": 2048}),
    ]
    for loaded in sharded_case.call("many", calls=calls):
        assert loaded["equal"]
        # Every byte once, small tensors (whole on every device) included: devices with the same share are served together.
        assert loaded["bytes_read"] == loaded["bytes_stored"]


QUARTER = (37984, 1024, 3072, 9, 8)  # an 8B model's proportions at a quarter of its width and layers
# Every array of Qwen3-8B at its own size; 3 of the 36 layers, so that file and devices take 3.6 GB each instead of 16.4.
EIGHT = (151936, 4096, 12288, 3, 32)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "stacked"), [(QUARTER, True), (QUARTER, False), (EIGHT, True)])
def test_peak_memory_of_loading_is_one_share_above_what_the_devices_hold(
    tmp_path: Path, shape: tuple, stacked: bool
) -> None:
    """At most 1.3 times one device's share of one array, above what the devices hold."""
    facts = sharded_case.call("memory_of_loading", folder=str(tmp_path), stacked=stacked, shape=shape)
    assert facts["held"] > 300 * MB
    # 16 MB: reading buffers, maps
    assert facts["peak"] <= facts["held"] + 1.3 * facts["largest_share"] + 16 * MB, facts
