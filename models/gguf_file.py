"""The GGUF file format: metadata and tensors, without their meaning."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paged_jax.models.errors import ModelLoadError, require

MAGIC = b"GGUF"
# Metadata value types by number; 8 is a string, 9 an array of one of the others.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DEPTH = 8  # of arrays in arrays; known files have none
LONG_ROW = 2**16  # values that are dequantised as one row
PLAIN = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


class TensorInfo(NamedTuple):
    """Where a tensor lies: shape with rows first, storage type by number, bytes from the start of the file."""

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
        """A tensor's values, quantised ones as float32. Raises ModelLoadError for a storage type that has none."""
        gguf = require("gguf", f"reading {self.path.name}")
        info = self.tensors[name]
        kind = gguf.GGMLQuantizationType(info.type_number)
        stored = np.frombuffer(self.data, np.uint8, count=info.nbytes, offset=info.start)
        if kind.name in PLAIN:
            return stored.view(PLAIN[kind.name]).reshape(info.shape)
        try:
            return gguf.dequantize(stored.reshape(_num_long_rows(info.shape), -1), kind).reshape(info.shape)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has storage type {kind.name}, which is unsupported"
            ) from error


def _num_long_rows(shape: tuple[int, ...]) -> int:
    """How many rows to cut a tensor's values into: the package takes 16 at a time, and is several times faster when those are
    about a million values."""
    num_rows = math.prod(shape[:-1])
    together = max(1, min(num_rows, LONG_ROW // max(1, shape[-1])))
    return num_rows // next(k for k in range(together, 0, -1) if num_rows % k == 0) if num_rows else 1


def open_gguf(path: Path) -> GGUFFile:
    """Read the header of a little-endian GGUF file, version 2 or 3, and check that every tensor is inside the file.

    Raises ModelLoadError.
    """
    gguf = require("gguf", f"reading {path.name}")
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ModelLoadError(f"{path}: not a GGUF file, expected it to start with {MAGIC!r}")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(data, path, len(MAGIC))
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelLoadError(f"{path}: GGUF version {version} is unsupported, expected 2 or 3, little-endian")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    placed = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        placed.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{path}: key 'general.alignment' must be a positive integer, got {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in placed:
        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        except (ValueError, KeyError):
            raise ModelLoadError(f"{path}: tensor {name!r} has unknown storage type {number}") from None
        count = 1
        for size in shape:
            count *= size
        if not shape or shape[-1] % block:
            raise ModelLoadError(f"{path}: tensor {name!r} has shape {shape}, expected rows of a multiple of {block}")
        info = TensorInfo(shape, number, start + offset, count // block * block_bytes)
        if info.start + info.nbytes > len(data):
            raise ModelLoadError(
                f"{path}: cut off in tensor {name!r} of shape {shape}: "
                f"it ends at byte {info.start + info.nbytes}, the file at {len(data)}"
            )
        tensors[name] = info
    return GGUFFile(path, metadata, tensors, data)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap, path: Path, offset: int):
        self.data, self.path, self.offset = data, path, offset

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple:
        size = struct.calcsize("<" + code) * count
        self._check(size)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.offset)
        self.offset += size
        return values

    def string(self) -> str:
        size = self.scalar("Q")
        self._check(size)
        text = self.data[self.offset : self.offset + size].decode("utf-8", "surrogateescape")
        self.offset += size
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise ModelLoadError(f"{self.path}: arrays in arrays, {MAX_DEPTH} deep, before byte {self.offset}")
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ModelLoadError(f"{self.path}: unknown metadata type {kind} before byte {self.offset}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in SCALARS:
            return list(self.scalars(SCALARS[item], count))
        return [self.value(item, depth + 1) for _ in range(count)]

    def _check(self, size: int) -> None:
        if self.offset + size > len(self.data):
            raise ModelLoadError(
                f"{self.path}: cut off in its header: {size} bytes expected at {self.offset} of {len(self.data)}"
            )
