"""A program that another process compiles, and that takes over once it is ready.

    this process    serves with the first program ....................  reads what was compiled
    another one     traces and compiles the successor, at low priority, into JAX's cache folder

Where an earlier start left it there, no other process is needed.

A thread would do the same, but it would hold Python's lock while it traces, and a process that ends
while a thread of it compiles may crash. So there must be a cache folder (`compile_cache`), and the
decoder's class must be importable. Where something is not as it must be, the first program goes on
serving.
"""

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import jax

from paged_jax.engine import stored_programs
from paged_jax.engine.dispatch import compile_programs
from paged_jax.engine.stored_programs import Spec

NICE = 10  # priority of the other process: it compiles in what the one that serves leaves
LOCK = "paged-jax-later.lock"  # in the cache folder

# Seconds of serving before a large program is read, which takes up to half a minute of a core. A
# process does not end in the middle of that, and a short script should not wait for it.
PATIENCE = 10


class Compilation:
    """A program on its way.

    Attributes:
        program: what was compiled, once it is ready.
        problem: why it could not be.
        thread: waits for the other process, then reads what that has compiled.
        is_wanted: whether someone waits for it.
    """

    def __init__(self, spec: Spec):
        self.program: Callable | None = None
        self.problem: str | None = None
        self.is_wanted = threading.Event()
        self.thread = threading.Thread(target=self._compile, args=(spec,), daemon=True)
        self.thread.start()

    def wait(self) -> str | None:
        """Wait until it has ended; returns why there is no program, None if there is one."""
        self.is_wanted.set()
        self.thread.join()
        return self.problem

    def _compile(self, spec: Spec) -> None:
        try:
            place = stored_programs.find_place(spec)
            if place is not None and place.exists():
                self.is_wanted.wait(PATIENCE)
                self.program = self._read(stored_programs.load, place)
            if self.program is None:
                self.problem = compile_elsewhere(spec)
                if self.problem is None:
                    self.program = self._read(read_or_compile, spec, place)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _read(self, how: Callable, *args: Any) -> Callable | None:
        """Read what was compiled. A process must not end in the middle of that."""
        atexit.register(self.thread.join)
        try:
            return how(*args)
        finally:
            atexit.unregister(self.thread.join)


def read_or_compile(spec: Spec, place: Path | None) -> jax.stages.Compiled:
    """Return the program of a spec: one that is stored, or that JAX has in its cache."""
    program = stored_programs.load(place)
    if program is None:
        run = compile_programs(spec.graphdef, spec.widths).run
        program = stored_programs.compile_and_save(spec, run, place)
    return program


def compile_elsewhere(spec: Spec) -> str | None:
    """Compile into JAX's cache folder, in another process. Returns why that did not work, or None.

    The process goes on where this one ends: the next start finds what it has compiled.
    """
    if jax.config.jax_compilation_cache_dir is None:
        return "JAX has no cache folder"
    command = [sys.executable, "-c", f"import {__name__} as later; later.serve_spec()"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it
    )
    begin = pickle.dumps((sys.path, NICE, os.getpid()))
    _, errors = process.communicate(begin + pickle.dumps(spec))
    return None if process.returncode == 0 else errors.decode(errors="replace")[-1000:]


def serve_spec() -> None:
    """Compile the spec that stands on the standard input: what the other process does."""
    sys.path[:], nice, parent = pickle.load(sys.stdin.buffer)
    if hasattr(os, "nice"):
        os.nice(nice)
    spec: Spec = pickle.load(sys.stdin.buffer)
    for name, value in spec.settings.items():
        jax.config.update(name, value)
    if wait_for_turn(jax.config.jax_compilation_cache_dir, parent):
        place = stored_programs.find_place(spec)
        if place is not None:  # what is read from JAX's cache could not be stored
            jax.config.update("jax_enable_compilation_cache", False)
        program = compile_programs(spec.graphdef, spec.widths).run.lower(*spec.shapes).compile()
        if place is not None:
            stored_programs.save(place, program)


def wait_for_turn(folder: str, parent: int) -> bool:
    """Wait until no other process compiles for this folder; return whether to compile here still.

    That takes gigabytes and both cores, and scripts that run one after the other want the same
    program. What had to wait goes on only if its parent is still there.
    """
    if fcntl is None:
        return True
    try:
        lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
            return True
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return True  # a folder elsewhere
    return os.getppid() == parent
