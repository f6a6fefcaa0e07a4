"""The GGUF file format: metadata and tensors, without their meaning.

`gguf.GGUFReader` reads the same header; it is not used for these reasons, measured with gguf 0.19
(the package's tables and its dequantisation are used):

- SmolLM2-135M: 2.1 s and 150 MB of memory to open it, against 0.09 s and 8 MB here. It makes one
  array for each of the 147,000 strings and numbers of the vocabulary.
- A damaged file ends in an IndexError, a NumPy ValueError or a RecursionError that says nothing of
  the file. A string of 2**60 bytes reads as empty. An array of 2**60 numbers fills the memory.
- Arrays in arrays come back flat: `[[1, 2], [3]] -> [1, 2, 3]`.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paged_jax.models.errors import ModelLoadError, require

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# struct codes of the scalar metadata types, by type number.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
MAX_DEPTH = 8  # of arrays in arrays; known files have none
LONG_ROW = 2**16  # values that are dequantised as one row
PLAIN = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


class TensorInfo(NamedTuple):
    """Where a tensor lies.

    Attributes:
        shape: sizes with rows first; files list them in the opposite order.
        type_number: the storage type, a `gguf.GGMLQuantizationType`.
        start: bytes from the start of the file.
        nbytes: bytes stored.
    """

    shape: tuple[int, ...]
    type_number: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open file: `metadata` by key, `tensors` by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    def read(self, name: str) -> np.ndarray:
        """Read a tensor's values, quantised ones as float32.

        Raises ModelLoadError for a storage type that cannot be dequantised.
        """
        gguf = require("gguf", f"reading {self.path.name}")
        info = self.tensors[name]
        kind = gguf.GGMLQuantizationType(info.type_number)
        stored = np.frombuffer(self.data, np.uint8, count=info.nbytes, offset=info.start)
        if kind.name in PLAIN:
            return stored.view(PLAIN[kind.name]).reshape(info.shape)
        rows = stored.reshape(_num_long_rows(info.shape), -1)
        try:
            return gguf.dequantize(rows, kind).reshape(info.shape)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has storage type {kind.name}, which is unsupported"
            ) from error


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of a little-endian GGUF file, version 2 or 3.

    Raises ModelLoadError where the header is damaged or a tensor reaches past the end of the file.
    """
    require("gguf", f"reading {path.name}")
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ModelLoadError(f"{path}: not a GGUF file, expected it to start with {MAGIC!r}")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data, path, len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelLoadError(
            f"{path}: GGUF version {version} is unsupported, expected 2 or 3, little-endian"
        )
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [cursor.tensor_entry() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(
            f"{path}: key 'general.alignment' must be a positive integer, got {alignment!r}"
        )
    padding = -cursor.offset % alignment  # the tensors start at the next multiple
    infos = [_tensor_info(path, entry, cursor.offset + padding, len(data)) for entry in entries]
    tensors = {entry.name: info for entry, info in zip(entries, infos, strict=True)}
    return GGUFFile(path, metadata, tensors, data)


class _TensorEntry(NamedTuple):
    """A tensor as the header lists it; `offset` counts from the start of all tensors."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class _Cursor:
    """A position in the file, from which little-endian values are read one after another."""

    def __init__(self, data: mmap.mmap, path: Path, offset: int):
        self.data, self.path, self.offset = data, path, offset

    def scalar(self, code: str) -> Any:
        """Read one value of a struct code."""
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple:
        """Read `count` values of a struct code."""
        size = struct.calcsize("<" + code) * count
        self._check_left(size)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.offset)
        self.offset += size
        return values

    def string(self) -> str:
        """Read a string with its length before it."""
        size = self.scalar("Q")
        self._check_left(size)
        text = self.data[self.offset : self.offset + size].decode("utf-8", "surrogateescape")
        self.offset += size
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a metadata value of a type number; `depth` counts the arrays around it."""
        if depth > MAX_DEPTH:
            raise ModelLoadError(
                f"{self.path}: arrays in arrays, {MAX_DEPTH} deep, before byte {self.offset}"
            )
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ModelLoadError(
                f"{self.path}: unknown metadata type {kind} before byte {self.offset}"
            )
        item, count = self.scalar("I"), self.scalar("Q")
        if item in SCALARS:
            return list(self.scalars(SCALARS[item], count))
        return [self.value(item, depth + 1) for _ in range(count)]

    def tensor_entry(self) -> _TensorEntry:
        """Read one tensor's name, shape, storage type and offset."""
        name = self.string()
        shape = self.scalars("Q", self.scalar("I"))[::-1]
        return _TensorEntry(name, shape, self.scalar("I"), self.scalar("Q"))

    def _check_left(self, size: int) -> None:
        if self.offset + size > len(self.data):
            raise ModelLoadError(
                f"{self.path}: cut off in its header: "
                f"{size} bytes expected at {self.offset} of {len(self.data)}"
            )


def _tensor_info(path: Path, entry: _TensorEntry, start: int, file_size: int) -> TensorInfo:
    """Compute where a tensor lies, `start` being the first byte of all. Raises ModelLoadError."""
    gguf = require("gguf", f"reading {path.name}")
    name, shape, number, offset = entry
    try:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    except (ValueError, KeyError):
        raise ModelLoadError(f"{path}: tensor {name!r} has unknown storage type {number}") from None
    if not shape or shape[-1] % block:
        raise ModelLoadError(
            f"{path}: tensor {name!r} has shape {shape}, expected rows of a multiple of {block}"
        )
    info = TensorInfo(shape, number, start + offset, math.prod(shape) // block * block_bytes)
    if (end := info.start + info.nbytes) > file_size:
        raise ModelLoadError(
            f"{path}: cut off in tensor {name!r} of shape {shape}: "
            f"it ends at byte {end}, the file at {file_size}"
        )
    return info


def _num_long_rows(shape: tuple[int, ...]) -> int:
    """Return how many rows to reshape a tensor to before it is dequantised.

    The package dequantises 16 rows at a time. It is several times faster when these are about a
    million values. Rows of up to LONG_ROW values are joined, as many as divide the row count:
    `(1000, 576) -> 10`, rows of 57,600 values.
    """
    num_rows = math.prod(shape[:-1])
    if num_rows == 0:
        return 1
    most = max(1, min(num_rows, LONG_ROW // max(1, shape[-1])))
    joined = next(k for k in range(most, 0, -1) if num_rows % k == 0)
    return num_rows // joined
