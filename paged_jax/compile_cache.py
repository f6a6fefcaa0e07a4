"""JAX's persistent compilation cache, in the user's cache folder if nothing else is asked for.

The first start of an `LLM` compiles for some seconds. The next one of the same sizes reads what was
compiled then.
"""

import hashlib
import os
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from paged_jax.errors import warn

VARIABLE = "PAGED_JAX_CACHE"  # a folder; "off" for no cache
OFF = ("off", "0", "no", "false")
SHORTEST = 0.1  # seconds: what compiles faster is not kept


def use_compile_cache() -> Path | None:
    """Let JAX keep what it compiles, and return where; None where it does not.

    A folder that was given to JAX itself stays, and so does a cache that was turned off there.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    if jax.config.jax_compilation_cache_dir is not None:
        return Path(jax.config.jax_compilation_cache_dir)
    if asked.lower() in OFF or not jax.config.jax_enable_compilation_cache:
        return None
    folder = Path(asked)
    try:
        folder = folder.expanduser() if asked else default_folder()
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        is_writable = False
    if not is_writable:
        if asked:
            warn(f"{VARIABLE}={asked}: is no folder that can be written; nothing compiled is kept")
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST)
    compilation_cache.reset_cache()  # where something was compiled before, JAX has settled on none
    return folder


def default_folder() -> Path:
    """Return the folder in the user's cache folder for this processor.

    Machines of several kinds may share a home, and code for one need not run on another.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "paged-jax" / f"{platform.machine() or 'any'}-{processor_name()}"


def processor_name() -> str:
    """Return a short name for the processor's set of instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:8]
