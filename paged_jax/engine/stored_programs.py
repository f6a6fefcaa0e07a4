"""Compiled programs in JAX's cache folder, found without tracing them.

JAX finds a program in its cache by the traced program, and to trace an engine's takes seconds, in
which Python serves nobody. These are found by what the trace would be made of: the decoder, the
widths, the shapes, JAX's settings and versions, and this package's code as it is loaded now.

Only decoders of this package, whose code is known, and only for CPUs. As with JAX's own cache,
whoever can write into the folder can run code here.
"""

import contextlib
import hashlib
import io
import os
import pickle
import sys
import threading
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.monitoring
from flax import nnx
from jax.experimental import serialize_executable

from paged_jax.code_digest import PACKAGE, code_digest
from paged_jax.compile_cache import processor_name

ENDING = ".program"
HIT = "/jax/compilation_cache/cache_hits"
MOST = 32  # programs that are kept, the newest
DISTRIBUTIONS = ("jax", "jaxlib", "flax", "numpy")
FOREIGN = ("builtins", "flax", "jax", "jaxlib", "numpy")  # their code is known by their versions


class Spec(NamedTuple):
    """All that an engine's program is made of.

    Attributes:
        graphdef: of the decoder.
        widths: token counts.
        shapes: of the arguments.
        settings: JAX's.
    """

    graphdef: nnx.GraphDef
    widths: tuple[int, ...]
    shapes: tuple[Any, ...]
    settings: dict[str, Any]


def find_place(spec: Spec) -> Path | None:
    """Return the file for the program of a spec, there or not, or None where none is stored.

    This reads and hashes the package's code, so whoever needs it twice keeps it.
    """
    with contextlib.suppress(Exception):  # it is compiled, then
        return _place(spec)


def load(place: Path | None) -> jax.stages.Compiled | None:
    """Return the program that is stored in a place, or None where there is none."""
    try:
        if place is None or not place.exists():
            return None
        stored = pickle.loads(zlib.decompress(place.read_bytes()))
        # On the first device, as what is compiled for arguments that are nowhere yet.
        devices = jax.devices()[:1]
        return serialize_executable.deserialize_and_load(*stored, execution_devices=devices)
    except Exception:  # a file that was cut off: it is compiled again, and written again
        return None


def save(place: Path, program: jax.stages.Compiled) -> None:
    """Store a program, where that can be done."""
    with contextlib.suppress(Exception):  # it is compiled again
        stored = zlib.compress(pickle.dumps(serialize_executable.serialize(program)), level=1)
        part = place.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            part.write_bytes(stored)
            os.replace(part, place)  # a reader sees all of it or none
        finally:
            part.unlink(missing_ok=True)
        files = place.parent.glob(f"*{ENDING}")
        for old in sorted(files, key=lambda file: file.stat().st_mtime)[:-MOST]:
            old.unlink(missing_ok=True)


def compile_and_save(spec: Spec, run: Any, place: Path | None) -> jax.stages.Compiled:
    """Compile `run` for a spec, and store the program in its place, in another thread.

    One that JAX had in its own cache is not stored: XLA loses functions of a program that is
    written a second time. Nor is one that was made under other settings than the spec's.
    """
    with hits_of_jax_cache() as hits:
        program = run.lower(*spec.shapes).compile()
    if place is not None and not hits and settings() == spec.settings:
        # No daemon: Python waits for it at its end.
        threading.Thread(target=save, args=(place, program)).start()
    return program


@contextlib.contextmanager
def hits_of_jax_cache() -> Iterator[list[str]]:
    """Collect what JAX finds in its own cache for this thread."""
    hits, this = [], threading.get_ident()

    def listen(event: str, **kwargs: Any) -> None:
        if event == HIT and threading.get_ident() == this:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def settings() -> dict[str, Any]:
    """Return JAX's settings as far as they are plain values."""
    plain = (bool, int, float, str, type(None))
    values = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    return {name: value for name, value in values.items() if isinstance(value, plain)}


def _place(spec: Spec) -> Path | None:
    """Return the file of a spec, or None where there is no folder or not all of it is known."""
    settings = spec.settings
    folder = settings.get("jax_compilation_cache_dir")
    if not folder or "://" in folder or not settings.get("jax_enable_compilation_cache"):
        return None
    # A device is no plain value, so a default one is not among the settings.
    if jax.default_backend() != "cpu" or settings.get("jax_default_device", "") is not None:
        return None
    described = _describe(spec)
    if described is None:
        return None
    facts = (
        code_digest(),
        processor_name(),
        jax.device_count(),
        os.environ.get("XLA_FLAGS", ""),
        [version(name) for name in DISTRIBUTIONS],
        sys.version,
    )
    key = hashlib.sha256(described + repr(facts).encode()).hexdigest()
    return Path(folder) / f"paged-jax-{key[:40]}{ENDING}"


def _describe(spec: Spec) -> bytes | None:
    """Return bytes that are the same for equal specs, or None where code of others is in it."""
    found: set[str] = set()

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            known = obj if isinstance(obj, type | FunctionType) else type(obj)
            found.add(known.__module__.partition(".")[0])
            return NotImplemented

    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.fast = True  # no references to what came before: whether objects are the same is chance
    try:
        pickler.dump(spec)
    except (ValueError, TypeError, AttributeError, RecursionError, pickle.PicklingError):
        return None
    return file.getvalue() if found <= {PACKAGE, *FOREIGN} else None
