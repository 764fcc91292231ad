"""Safetensors files against the format's own library; damaged, incomplete and contradictory ones are refused."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dstill_jax.errors import UserError
from dstill_jax.weights import safetensors_io
from dstill_jax.weights.safetensors_io import file_dtype, open_weights, write_safetensors


def some_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "b": rng.normal(size=(3, 5)).astype(np.float32),
        "a": rng.normal(size=(7,)).astype(np.float16),
        "c": rng.normal(size=(2, 3)).astype(ml_dtypes.bfloat16),
    }


def test_files_of_the_formats_own_library_are_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = open_weights(tmp_path)
    assert set(files.tensors) == set(tensors)
    for name, expected in tensors.items():
        assert files.read(name).dtype == expected.dtype
        np.testing.assert_array_equal(files.read(name), expected)


@pytest.mark.parametrize(("dtype", "name"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_the_formats_own_library_reads_what_is_written(tmp_path: Path, dtype: str, name: str) -> None:
    assert file_dtype(dtype) == name
    tensors = {key: value.astype(np.float32) for key, value in some_tensors().items()}
    tensors["odd"] = np.ones((1, 1), np.float32)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, [(key, value.shape, name) for key, value in tensors.items()], iter(tensors.values()))
    read = load_file(path)
    assert list(path.parent.iterdir()) == [path]
    for key, value in tensors.items():
        np.testing.assert_array_equal(read[key], value.astype(np.dtype(dtype)))


def test_a_transposed_view_is_written_in_its_own_order(tmp_path: Path) -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_safetensors(tmp_path / "model.safetensors", [("w", (3, 2), "F32")], [value.T])
    np.testing.assert_array_equal(open_weights(tmp_path).read("w"), value.T)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, [("w", (2,), "F32")], [np.zeros(2, np.float32)])
    before = path.read_bytes()

    def disk_full():
        yield np.ones(2, np.float32)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_safetensors(path, [("w", (2,), "F32"), ("v", (2,), "F32")], disk_full())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def sharded(folder: Path) -> dict[str, np.ndarray]:
    first, second = some_tensors(1), {f"{k}2": v for k, v in some_tensors(2).items()}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    write_index(folder, weight_map)
    return first | second


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    files = open_weights(tmp_path)
    assert set(files.tensors) == set(tensors)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(files.read(name), expected)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    one = "model-00001-of-00002.safetensors"
    for weight_map, message in [
        ({**index, "ghost": one}, "ghost"),
        ({k: v for k, v in index.items() if k != "a"}, "holds tensor a"),
        ({**index, "a": "model-00003-of-00002.safetensors"}, "model-00003-of-00002.safetensors"),
        ({**index, "a": "../model.safetensors"}, "not a file beside it"),
        ({}, "no weight_map"),
    ]:
        write_index(tmp_path, weight_map)
        with pytest.raises(UserError, match=message):
            open_weights(tmp_path)


@pytest.mark.parametrize(
    ("rows", "columns", "columns_read"),
    [
        ((2, 9), (0, 2048), (0, 2048)),
        ((0, 9), (1022, 2046), (1022, 2046)),  # 4 KB of each row
        ((3, 9), (1022, 2045), (0, 2048)),  # less: the rows are read whole
        ((3, 4), (0, 1024), (0, 1024)),
    ],
)
def test_part_of_a_matrix_is_read_in_blocks_and_each_byte_once(
    rows: tuple, columns: tuple, columns_read: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = np.random.default_rng(0).normal(size=(9, 2048)).astype(np.float32)
    save_file({"before": np.zeros(3, np.float32), "w": value}, tmp_path / "model.safetensors")
    files, plain, ranges = open_weights(tmp_path), safetensors_io._read_into, []

    def noting(file, stored, start, out, name):
        plain(file, stored, start, out, name)
        ranges.append(np.arange(start, start + out.nbytes) - stored.offset)

    monkeypatch.setattr(safetensors_io, "_read_into", noting)
    monkeypatch.setattr(safetensors_io, "_BLOCK_BYTES", 4 * 4 * 2048)
    found = np.full((rows[1] - rows[0], columns[1] - columns[0]), np.nan, np.float32)
    blocks = 0
    for at, block in files.read_blocks("w", rows, columns):
        found[at] = block
        blocks += 1
    np.testing.assert_array_equal(found, value[slice(*rows), slice(*columns)])
    offsets = np.arange(value.nbytes).reshape(9, 2048, 4)[slice(*rows), slice(*columns_read)]
    np.testing.assert_array_equal(np.concatenate(ranges), offsets.reshape(-1))
    rows_of_a_block = 4 * 2048 // (columns_read[1] - columns_read[0])
    assert blocks == -(-(rows[1] - rows[0]) // rows_of_a_block)


def test_a_vector_is_read_as_one_column(tmp_path: Path) -> None:
    save_file({"v": np.arange(7, dtype=np.float32)}, tmp_path / "model.safetensors")
    ((at, block),) = open_weights(tmp_path).read_blocks("v", (2, 6), (0, 1))
    assert at == slice(0, 4) and block[:, 0].tolist() == [2, 3, 4, 5]


def test_a_file_cut_off_after_it_was_opened_is_reported(tmp_path: Path) -> None:
    save_file({"w": np.zeros((4, 4), np.float32)}, tmp_path / "model.safetensors")
    files = open_weights(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(files.tensors["w"].offset + 20)
    for read in (lambda: files.read("w"), lambda: list(files.read_blocks("w", (0, 4), (0, 2)))):
        with pytest.raises(UserError, match="was cut off while it was read, in tensor w"):
            read()


def test_a_folder_without_or_with_two_kinds_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="pytorch_model.bin"):
        open_weights(tmp_path)
    sharded(tmp_path)
    save_file(some_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has both"):
        open_weights(tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(some_tensors(), path)
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
    wrong_size = whole[8 : 8 + length].replace(b"[3,5]", b"[3,6]")
    assert wrong_size != whole[8 : 8 + length]
    for content in (
        b"",
        whole[:4],
        whole[:-1],
        whole[: 8 + length // 2],
        pointer,
        whole[:8] + b"x" * (len(whole) - 8),
        whole[:8] + wrong_size + whole[8 + length :],
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
            open_weights(tmp_path)


def test_other_dtypes_are_refused_when_read(tmp_path: Path) -> None:
    save_file({"w": np.zeros(3, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tensor w is stored as I8"):
        open_weights(tmp_path).read("w")
    with pytest.raises(UserError, match="no tensor v"):
        open_weights(tmp_path).read("v")
    with pytest.raises(UserError, match="dtype='int8'"):
        file_dtype("int8")


def test_the_fingerprint_follows_config_names_shapes_and_values(tmp_path: Path) -> None:
    def fingerprint(tensors: dict[str, np.ndarray], config: bytes = b"{}") -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        return open_weights(tmp_path).fingerprint(config)

    base = some_tensors()
    last = {**base, "c": base["c"].copy()}
    last["c"][0, 0] += 1
    seen = [
        fingerprint(base),
        fingerprint(base, b"{ }"),
        fingerprint(last),
        fingerprint({**base, "b": base["b"].reshape(5, 3)}),
        fingerprint({("d" if k == "c" else k): v for k, v in base.items()}),
    ]
    assert len(set(seen)) == len(seen) and fingerprint(base) == seen[0]
