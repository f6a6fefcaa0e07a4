"""The files of a Hugging Face model directory: JSON and safetensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.models.errors import ModelLoadError, require

FLOATS = ("float32", "float16", "bfloat16", "float64")

type Kind = type | tuple[type, ...]
NUMBER = (float, int)


class Settings:
    """A JSON object whose values are checked for their types.

    Attributes:
        values: the object.
        origin: what errors call it.
    """

    def __init__(self, values: dict[str, Any], origin: str):
        self.values, self.origin = values, origin

    def get(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Return the value, or the default where the key is absent or null.

        Raises ModelLoadError that names the key for a value of another type. A bool is no int.
        """
        value = self.values.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ModelLoadError(
                f"{self.origin}: key {key!r} must be {_names(kind)}, got {value!r:.80}"
            )
        return value

    def need(self, key: str, kind: Kind) -> Any:
        """Return the value. Raises ModelLoadError also where it is absent or null."""
        value = self.get(key, kind)
        if value is None:
            fault = "is null" if key in self.values else "is missing"
            raise ModelLoadError(f"{self.origin}: key {key!r} {fault}, expected {_names(kind)}")
        return value


def _names(kind: Kind) -> str:
    """Return types in words: `(float, int) -> "float or int"`."""
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


def read_json(path: Path) -> Settings:
    """Read a JSON object. Raises ModelLoadError where the file holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last for [[[[...
        raise ModelLoadError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return Settings(values, str(path))


def read_json_if_there(path: Path) -> Settings:
    """Read a JSON object as `read_json` does; without a file, the object is empty."""
    return read_json(path) if path.exists() else Settings({}, str(path))


class SafetensorsFiles:
    """The tensors of a directory, in one file or in those that an index lists.

    Attributes:
        shapes: name -> shape.
    """

    def __init__(self, directory: Path):
        """Open the files. Raises ModelLoadError where one is absent, damaged or lacks a tensor."""
        self.directory = directory
        self._file_of = _file_of_tensor(directory)
        files = sorted(set(self._file_of.values()))
        self._handles = {file: _open(directory / file) for file in files}
        held = {file: set(handle.keys()) for file, handle in self._handles.items()}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, file in self._file_of.items():
            if name not in held[file]:
                raise ModelLoadError(
                    f"{directory}: tensor {name!r} is missing from {file}, where the index puts it"
                )
            self.shapes[name] = tuple(self._handles[file].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """Read a tensor. Raises ModelLoadError for anything but floats of 16 bits or more."""
        file = self._handles[self._file_of[name]]
        try:
            values = file.get_tensor(name)
        except (AttributeError, TypeError) as error:  # a dtype that NumPy lacks: floats of 8 bits
            kind = file.get_slice(name).get_dtype()
            raise ModelLoadError(
                f"{self.directory}: tensor {name!r} has dtype {kind}, "
                "expected a float of 16 bits or more"
            ) from error
        if values.dtype.name not in FLOATS:
            raise ModelLoadError(
                f"{self.directory}: tensor {name!r} has dtype {values.dtype}, "
                "expected a float of 16 bits or more"
            )
        return values


def _file_of_tensor(directory: Path) -> dict[str, str]:
    """Return each tensor's file name. Raises ModelLoadError for a bad index or absent files."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise ModelLoadError(
                f"{directory}: has neither model.safetensors nor model.safetensors.index.json"
            )
        return dict.fromkeys(_open(single).keys(), single.name)
    files = read_json(index).need("weight_map", dict)
    if bad := [f for f in files.values() if not isinstance(f, str) or Path(f).name != f]:
        raise ModelLoadError(f"{index}: 'weight_map' must name files beside it, got {bad[0]!r}")
    for file in sorted(set(files.values())):
        if not (directory / file).is_file():
            raise ModelLoadError(f"{index}: names {file!r}, which is absent from {directory}")
    return files


def _open(path: Path) -> Any:
    safetensors = require("safetensors", f"reading {path.name}")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelLoadError(
            f"{path}: cannot be read as safetensors, it may be cut off: {error}"
        ) from error
