"""Which implementation runs: by platform, device, dtype and shape. Nothing is timed."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp

from . import xla, xla_cpu  # noqa: F401  of plain JAX; a trace would import them

# Devices by `device_kind`: a program may be compiled for a device that is not there to be asked.
HOPPER = ("H100", "H200", "GH200", "H800", "H20")
BEFORE_AMPERE = (
    *("K40", "K80", "M40", "M60", "P4", "P40", "P100", "V100", "V100S", "T4", "T4G", "GTX"),
    *("TITAN", "Quadro", "2060", "2070", "2080"),
)
CONVERTS_FP8 = (  # they have an instruction for float8_e4m3fn: sm_89 and later
    *HOPPER,
    *("L4", "L40", "L40S", "Ada", "4060", "4070", "4080", "4090", "B200", "GB200", "B300"),
    *("GB300", "Blackwell", "5060", "5070", "5080", "5090"),
)

# On CUDA the first that covers the problem is taken; elsewhere XLA, which covers everything.
type Implementation = Literal["mosaic_gpu", "triton", "xla"]
PREFERENCE: tuple[str, ...] = get_args(Implementation.__value__)


class Coverage(NamedTuple):
    """The problems and devices that an implementation covers.

    Attributes:
        q_dtypes, kv_dtypes, head_dims, block_sizes: the values that are covered.
        has_mixed_dtypes: whether pages of another dtype than q's are covered.
        has_scales: whether pages with scales are covered.
        only: the devices that are covered; all but `never` where it is empty.
        never: the devices that are not covered.
        devices: the covered devices in words.
        wraps: from and to how many bytes a pool of one-byte pages is not covered, because offsets
            into it wrap.
    """

    q_dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    head_dims: Sequence[int]
    block_sizes: Sequence[int]
    has_mixed_dtypes: bool
    has_scales: bool
    only: tuple[str, ...]
    never: tuple[str, ...]
    devices: str
    wraps: tuple[int, int] | None = None


ANY = range(2**31)
FLOATS = ("float32", "bfloat16", "float16")
BYTES = ("int8", "float8_e4m3fn", "float8_e5m2")
COVERAGE = {
    "triton": Coverage(
        q_dtypes=FLOATS,
        kv_dtypes=FLOATS + BYTES,
        head_dims=range(1, 257),
        block_sizes=ANY,
        has_mixed_dtypes=True,
        has_scales=True,
        only=(),
        never=BEFORE_AMPERE,
        devices="Ampere (sm_80) and later",
        # Pallas-Triton counts offsets in int32 up to 2^32 bytes, and Triton takes them as signed.
        # For pages of two bytes and more a number that does not fit is never reached.
        wraps=(2**31, 2**32),
    ),
    "mosaic_gpu": Coverage(
        q_dtypes=FLOATS[1:],
        kv_dtypes=FLOATS[1:],
        head_dims=(64, 128),
        block_sizes=(8, 16, 32, 64),  # a page is one TMA box, and a chunk a whole number of pages
        has_mixed_dtypes=False,
        has_scales=False,
        only=HOPPER,
        never=(),
        devices="Hopper (sm_90a)",
    ),
}
MULTIPROCESSORS = {  # of other kinds 132, as of an H100, H200
    **{"A100": 108, "A10": 72, "A10G": 80, "L4": 58, "L40": 142, "L40S": 142, "4090": 128},
    **{"H20": 78, "B200": 148, "GB200": 148, "B300": 160, "GB300": 160, "5090": 170},
}
INTERPRETED_PROGRAMS = 3  # an interpreter runs one after the other, dead ones too
MOST_HEADS = 64  # query heads of one KV head: rows of one program


class Problem(NamedTuple):
    """What decides; all of it static."""

    q_dtype: str
    kv_dtype: str
    head_dim: int
    block_size: int
    group: int
    pool_size: int
    has_scales: bool

    @classmethod
    def of(cls, q, k_pages, k_scale, v_scale) -> "Problem":
        """Return the problem of the arguments of `ragged_paged_attention`."""
        return cls(
            q_dtype=q.dtype.name,
            kv_dtype=k_pages.dtype.name,
            head_dim=q.shape[2],
            block_size=k_pages.shape[1],
            group=q.shape[1] // k_pages.shape[2],
            pool_size=k_pages.size,
            has_scales=k_scale is not None or v_scale is not None,
        )


def why_not(implementation: str, problem: Problem, device_kind: str | None) -> str:
    """Return why the implementation cannot take the problem on the device, or an empty string.

    A `device_kind` of None is a device that is not known, and counts as covered.
    """
    if implementation == "xla":
        return ""
    covered = COVERAGE[implementation]
    return (
        _why_not_dtypes(covered, problem)
        or _why_not_sizes(covered, problem)
        or _why_not_device(covered, device_kind)
        or _why_not_pool(covered, problem)
    )


def _why_not_dtypes(covered: Coverage, problem: Problem) -> str:
    if problem.q_dtype not in covered.q_dtypes:
        return f"q of dtype {problem.q_dtype} is not covered, only {', '.join(covered.q_dtypes)}"
    if problem.kv_dtype not in covered.kv_dtypes:
        only = ", ".join(covered.kv_dtypes)
        return f"pages of dtype {problem.kv_dtype} are not covered, only {only}"
    return ""


def _why_not_sizes(covered: Coverage, problem: Problem) -> str:
    p = problem
    if p.head_dim not in covered.head_dims:
        return f"head_dim {p.head_dim} is not covered, only {_in_words(covered.head_dims)}"
    if p.block_size not in covered.block_sizes:
        return f"block_size {p.block_size} is not covered, only {_in_words(covered.block_sizes)}"
    if p.group > MOST_HEADS:
        return f"{p.group} query heads to a KV head are not covered, at most {MOST_HEADS}"
    if p.kv_dtype != p.q_dtype and not covered.has_mixed_dtypes:
        return f"pages of another dtype than q's ({p.q_dtype}) are not covered"
    if p.has_scales and not covered.has_scales:
        return "pages with scales are not covered"
    return ""


def _why_not_device(covered: Coverage, device_kind: str | None) -> str:
    if device_kind is None:
        return ""
    is_covered = not covered.only or _is_listed(device_kind, covered.only)
    if is_covered and not _is_listed(device_kind, covered.never):
        return ""
    return f"device {device_kind!r} is not covered, only {covered.devices}"


def _why_not_pool(covered: Coverage, problem: Problem) -> str:
    if covered.wraps is None or jnp.dtype(problem.kv_dtype).itemsize > 1:
        return ""
    first, last = covered.wraps
    if not first < problem.pool_size <= last:
        return ""
    return (
        f"pages of one byte a number that are {problem.pool_size} bytes large are not covered:"
        f" Pallas-Triton's offsets wrap from {first} to {last} bytes"
    )


def pick_for_cuda(problem: Problem, device_kind: str | None) -> str:
    """Return the implementation that `implementation=None` means on CUDA.

    Where the device is not known it is XLA: what Pallas compiles is for one kind of device.
    """
    if device_kind is None:
        return "xla"
    return next(name for name in PREFERENCE if not why_not(name, problem, device_kind))


def has_fp8_conversion(device_kind: str | None) -> bool:
    """Return whether the kind is a GPU with an instruction for float8_e4m3fn.

    It came with compute capability 8.9. A device that is not known counts as one without it.
    """
    return device_kind is not None and _is_listed(device_kind, CONVERTS_FP8)


def num_programs(device_kind: str | None, resident: int, is_interpreted: bool) -> int:
    """Return how many programs a device runs at once, `resident` on each multiprocessor."""
    if is_interpreted:
        return INTERPRETED_PROGRAMS
    words = (device_kind or "").replace("-", " ").split()
    return resident * next((n for kind, n in MULTIPROCESSORS.items() if kind in words), 132)


def _is_listed(device_kind: str, words: tuple[str, ...]) -> bool:
    """Return whether a word of the kind is listed: "NVIDIA A100-SXM4-80GB" has the word A100."""
    return any(word in words for word in device_kind.replace("-", " ").split())


def load(implementation: str) -> ModuleType:
    """Return the implementation's module.

    The Pallas ones are imported at first use: they take a while, and not every jaxlib has them.
    """
    return importlib.import_module(f".{implementation}", __package__)


def _in_words(values: Sequence) -> str:
    if isinstance(values, range):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))
