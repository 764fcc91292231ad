"""Safetensors files: read tensor by tensor from one file or a sharded folder, write one file in a single pass.

Called by `load` and by converters. The format is eight bytes of header length, a JSON header, then raw little-endian
data; reading it here keeps bfloat16 as it is and never holds more than the tensor asked for.
"""

import hashlib
import io
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from dstill_jax.errors import UserError
from dstill_jax.weights.folders import atomic_path, read_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MAX_HEADER = 100_000_000  # the format's own limit
_ALIGNMENT = 64
_FINGERPRINT_BYTES = 256  # of each tensor
_SHORT_READ = 4096  # bytes; a disk delivers about as much whatever is asked of it
_BLOCK_BYTES = 2**22


def file_dtype(dtype: str) -> str:
    """`"bfloat16"` -> `"BF16"`, the spelling inside a file.

    Raises:
      UserError: not one of float32, bfloat16, float16.
    """
    name = str(dtype)
    if name not in _NAMES:
        raise UserError(f"dtype={name!r} is not supported; use one of {', '.join(_NAMES)}")
    return _NAMES[name]


def numpy_dtype(dtype: str) -> np.dtype:
    """`"bfloat16"` -> the NumPy dtype; the same names as `file_dtype`."""
    return _DTYPES[file_dtype(dtype)]


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that a CPU device can take over without a copy (NumPy alone aligns to 16 bytes)."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies."""

    file: Path
    dtype: str  # as in the file: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int  # in bytes, from the start of the file
    num_bytes: int


class WeightFiles:
    """The tensors of a model folder by name, read one at a time."""

    def __init__(self, tensors: dict[str, StoredTensor], headers: dict[str, bytes]) -> None:
        self.tensors = tensors
        self._headers = headers

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype and shape.

        Raises:
          UserError: the tensor is absent or of a dtype other than float32, bfloat16 and float16.
        """
        stored = self._known(name)
        array = aligned_empty(stored.shape, _DTYPES[stored.dtype])
        with open(stored.file, "rb", buffering=0) as file:
            _read_into(file, stored, stored.offset, array.reshape(-1), name)
        return array

    def read_blocks(
        self, name: str, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Rows and columns (first, end) of a matrix in its stored dtype, some rows at a time; a vector [R] is [R, 1].

        Yields which of the rows asked for, and their numbers: at most 4 MB, or one row, in a buffer used again for the
        next rows. Whole rows are read where `reads_whole_rows`, else the columns of each row by themselves.

        Raises:
          UserError: as `read`.
        """
        stored = self._known(name)
        dtype = _DTYPES[stored.dtype]
        row_length = math.prod(stored.shape[1:])
        left, right = columns
        at_once = self.reads_whole_rows(name, columns)
        length = row_length if at_once else right - left
        num_rows = max(1, _BLOCK_BYTES // (length * dtype.itemsize))
        buffer = np.empty((min(num_rows, rows[1] - rows[0]), length), dtype)
        with open(stored.file, "rb", buffering=0) as file:
            for first in range(*rows, len(buffer)):
                block = buffer[: rows[1] - first]
                start = stored.offset + first * row_length * dtype.itemsize
                if at_once:
                    _read_into(file, stored, start, block.reshape(-1), name)
                else:
                    for i, row in enumerate(block):
                        _read_into(file, stored, start + (i * row_length + left) * dtype.itemsize, row, name)
                yield slice(first - rows[0], first - rows[0] + len(block)), block[:, left:right] if at_once else block

    def reads_whole_rows(self, name: str, columns: tuple[int, int]) -> bool:
        """Whether the columns are so few that the disk would deliver their neighbours anyway, or all there are."""
        stored = self._known(name)
        count = columns[1] - columns[0]
        return count == math.prod(stored.shape[1:]) or count * _DTYPES[stored.dtype].itemsize < _SHORT_READ

    def _known(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise UserError(f"the weights have no tensor {name}")
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise UserError(
                f"{stored.file}: tensor {name} is stored as {stored.dtype}; convert it to one of {', '.join(_DTYPES)}"
            )
        return stored

    def fingerprint(self, config: bytes) -> str:
        """Hex SHA-256 over a config, every header, and the first bytes of every tensor: cheap and deterministic."""
        digest = hashlib.sha256(config)
        for file in sorted(self._headers):
            digest.update(self._headers[file])
        for name in sorted(self.tensors):
            stored = self.tensors[name]
            with open(stored.file, "rb") as file:
                file.seek(stored.offset)
                digest.update(file.read(min(_FINGERPRINT_BYTES, stored.num_bytes)))
        return digest.hexdigest()


def _read_into(file: io.RawIOBase, stored: StoredTensor, start: int, out: np.ndarray, name: str) -> None:
    """Fills a contiguous 1-D array from byte `start` on."""
    view = memoryview(out.view(np.uint8))
    file.seek(start)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise UserError(f"{stored.file} was cut off while it was read, in tensor {name}")
        view = view[count:]


def open_weights(folder: Path) -> WeightFiles:
    """The weights of a folder: `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Raises:
      UserError: no weights, both forms at once, a missing or damaged file, or an index that disagrees with its shards.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.exists() and index.exists():
        raise UserError(f"{folder} has both {WEIGHTS_FILE} and {INDEX_FILE}; remove the one that is out of date")
    if single.exists():
        tensors, header = _read_header(single)
        return WeightFiles(tensors, {single.name: header})
    if index.exists():
        return _open_shards(index)
    other = next((p.name for p in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.safetensors"))), None)
    found = f" (it has {other})" if other else ""
    raise UserError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{found}; save the model as safetensors there")


def _open_shards(index: Path) -> WeightFiles:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map")
    tensors: dict[str, StoredTensor] = {}
    headers: dict[str, bytes] = {}
    for shard in sorted({str(file) for file in weight_map.values()}):
        path = index.parent / shard
        if Path(shard).name != shard or not path.is_file():
            raise UserError(f"{index} lists {shard!r}, which is not a file beside it; download the folder again")
        stored, headers[shard] = _read_header(path)
        for name, tensor in stored.items():
            if weight_map.get(name) != shard:
                raise UserError(f"{path} holds tensor {name}, but {index.name} puts it in {weight_map.get(name)!r}")
            tensors[name] = tensor
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise UserError(f"{index} puts {lost[0]} in {weight_map[lost[0]]}, which does not hold it ({len(lost)} such)")
    return WeightFiles(tensors, headers)


def _read_header(path: Path) -> tuple[dict[str, StoredTensor], bytes]:
    damaged = f"{path} is damaged or cut off (or only a pointer to the real file); download it again"
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise UserError(damaged)
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _stored_tensor(path, 8 + length, fields) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(damaged) from error
    for name, tensor in tensors.items():
        known = _DTYPES.get(tensor.dtype)  # a tensor of another dtype is refused when it is read
        whole = known is None or tensor.num_bytes == math.prod(tensor.shape) * known.itemsize
        if not whole or tensor.num_bytes < 0 or tensor.offset + tensor.num_bytes > size:
            raise UserError(f"{damaged} [tensor {name}, file of {size} bytes]")
    return tensors, raw


def _stored_tensor(path: Path, data_start: int, fields: dict) -> StoredTensor:
    begin, end = fields["data_offsets"]
    shape = tuple(int(n) for n in fields["shape"])
    if begin < 0 or any(n < 0 for n in shape):
        raise ValueError("negative offset or size")
    return StoredTensor(path, str(fields["dtype"]), shape, data_start + begin, end - begin)


def write_safetensors(
    path: Path, specs: Sequence[tuple[str, Sequence[int], str]], values: Iterable[np.ndarray]
) -> None:
    """Write one file in a single pass, atomically: `path` holds the whole new file or what it held before.

    Args:
      path: the file.
      specs: (name, shape, file dtype such as "F32") of each tensor.
      values: the tensors in the same order, cast to that dtype here; only one is held at a time.

    Raises:
      ValueError: the values do not fit the specs.
      OSError: the disk is full or not writable; nothing is left behind.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # what transformers expects
    offset = 0
    for name, shape, dtype in specs:
        num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with atomic_path(path) as temporary:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for (name, shape, dtype), value in zip(specs, values, strict=True):
                if tuple(value.shape) != tuple(shape):
                    raise ValueError(f"{name}: value of shape {value.shape} where {tuple(shape)} was announced")
                file.write(np.ascontiguousarray(value, _DTYPES[dtype]).view(np.uint8).data)
