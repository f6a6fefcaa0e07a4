"""What all tests share: the toy decoder is imported as `toy_decoder`, plain models likewise."""

import os
import pathlib
import sys

import jaxtyping
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

# Set before jax is first imported. Four CPU devices, for the tests on meshes. Nearly all of the
# time is compiling: LLVM is told to take less of it; what XLA makes of a program is not touched by
# that. (Optimisation level 0 would halve it, but on jax 0.12.0.1 some programs then sample other
# tokens than they should.)
FLAGS = ("--xla_force_host_platform_device_count=4", "--xla_llvm_disable_expensive_passes=true")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

os.environ["PAGED_JAX_CACHE"] = "off"  # what is tested is compiled here and now

# Every call and every dataclass of the product is checked against its annotations, shapes included.
jaxtyping.install_import_hook("paged_jax", "annotations.check")


from paged_jax.config import token_widths  # noqa: E402
from paged_jax.default_sizes import Widths  # noqa: E402


@pytest.fixture
def no_annotation_checks():
    """Turn the checks of annotations off, as users have it.

    For arguments of a wrong type, where an annotation would raise before the function does. And for
    thousands of calls of what is traced and checked elsewhere: a check costs far more than a call.
    """
    was_off = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", was_off)


@pytest.fixture(autouse=True)
def two_widths(monkeypatch):
    """Let `LLM` compile what an engine compiles: a ladder of widths takes long, for each toy."""
    choose = "paged_jax.llm.choose_widths"
    monkeypatch.setattr(choose, lambda config: Widths(token_widths(config), None))


@pytest.fixture
def cache_folder(tmp_path):
    """Let JAX keep all that it compiles in a folder."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Let go of compiled programs when there are many.

    Each takes some hundred memory maps. Linux gives a process 65,530, and XLA crashes without.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        sys.modules["jax"].clear_caches()


# With two processes, what takes longest must not begin last.
LONGEST_FIRST = (
    "test_golden",
    "test_state_machine",
    "test_prefix_caching",
    "test_compiled",
    "test_generate",
    "test_invariance",
)
# Files that are slow as a whole: nearly each of their tests compiles an engine, a decoder or a
# kernel. What stays in a quick run says in two minutes whether bookkeeping, sampling, the engine,
# loaders and the kernels' surroundings still hold.
SLOW = (
    "test_attention",
    "test_beam_search",
    "test_compiled",
    "test_generate",
    "test_llama",
    "test_llm",
    "test_mosaic_faults",
    "test_parallel_sampling",
    "test_prefix_caching",
    "test_scheduler",
    "test_state_machine",
    "test_step",
)


def pytest_collection_modifyitems(items):
    """Put the longest files in front, and mark those that are slow as a whole."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter):
    """What tests measured (`record_property("measured", ...)`), also when all pass and nothing else
    is shown.
    """
    reports = [r for status in ("passed", "failed") for r in terminalreporter.stats.get(status, [])]
    lines = [
        value
        for r in reports
        if r.when == "call"
        for name, value in r.user_properties
        if name == "measured"
    ]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
