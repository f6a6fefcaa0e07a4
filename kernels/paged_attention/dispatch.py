"""Which implementation runs: by platform, device, dtype and shape. Deterministic; nothing is timed."""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Names of devices, as `device_kind` has them: what is compiled for need not be there to be asked.
HOPPER = ("H100", "H200", "GH200", "H800", "H20")
BEFORE_AMPERE = (
    *("K40", "K80", "M40", "M60", "P4", "P40", "P100", "V100", "V100S", "T4", "T4G", "GTX", "TITAN", "Quadro"),
    *("2060", "2070", "2080"),
)
CONVERTS_FP8 = (  # an instruction for float8_e4m3fn: sm_89 and later
    *HOPPER,
    *("L4", "L40", "L40S", "Ada", "4060", "4070", "4080", "4090", "B200", "GB200", "B300", "GB300", "Blackwell"),
    *("5060", "5070", "5080", "5090"),
)

# The first that covers the problem is taken. XLA covers everything.
PREFERENCE = {"cpu": ("xla",), "cuda": ("mosaic_gpu", "triton", "xla"), "other": ("xla",)}


class Coverage(NamedTuple):
    """What an implementation is for.

    `mixed` and `scales` are whether it takes pages of another dtype than q's, and pages with scales. Of devices it takes those
    that it names in `only`, or all but `never`; `devices` says so in words.
    """

    q_dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    head_dims: Sequence[int]
    block_sizes: Sequence[int]
    mixed: bool
    scales: bool
    only: tuple[str, ...]
    never: tuple[str, ...]
    devices: str


ANY = range(2**31)
FLOATS, BYTES = ("float32", "bfloat16", "float16"), ("int8", "float8_e4m3fn", "float8_e5m2")
COVERAGE = {
    "triton": Coverage(
        q_dtypes=FLOATS,
        kv_dtypes=FLOATS + BYTES,
        head_dims=range(1, 257),
        block_sizes=ANY,
        mixed=True,
        scales=True,
        only=(),
        never=BEFORE_AMPERE,
        devices="Ampere (sm_80) and later",
    ),
    "mosaic_gpu": Coverage(
        q_dtypes=FLOATS[1:],
        kv_dtypes=FLOATS[1:],
        head_dims=(64, 128),
        block_sizes=(8, 16, 32, 64),  # a page is one TMA box, and a chunk a whole number of pages
        mixed=False,
        scales=False,
        only=HOPPER,
        never=(),
        devices="Hopper (sm_90a)",
    ),
}
MOST_HEADS = 64  # query heads of one KV head: rows of one program

# Pallas-Triton counts offsets in int32 up to 2^32 bytes and Triton takes them as signed: for pages of two bytes and more a
# number that does not fit is never reached, for pages of one byte it is.
TRITON_WRAPS = (2**31, 2**32)


class Problem(NamedTuple):
    """What decides; all of it static."""

    q_dtype: str
    kv_dtype: str
    head_dim: int
    block_size: int
    group: int
    pool_size: int
    scaled: bool

    @classmethod
    def of(cls, q, k_pages, k_scale, v_scale) -> "Problem":
        """That of the arguments of `ragged_paged_attention`."""
        group = q.shape[1] // k_pages.shape[2]
        shape = q.shape[2], k_pages.shape[1], group, k_pages.size
        return cls(q.dtype.name, k_pages.dtype.name, *shape, k_scale is not None or v_scale is not None)


def why_not(implementation: str, problem: Problem, device_kind: str | None) -> str:
    """Why the implementation cannot take the problem on the device (None: not known), or an empty string."""
    if implementation == "xla":
        return ""
    covered, p = COVERAGE[implementation], problem
    if p.q_dtype not in covered.q_dtypes:
        return f"q of dtype {p.q_dtype} is not covered, only {', '.join(covered.q_dtypes)}"
    if p.kv_dtype not in covered.kv_dtypes:
        return f"pages of dtype {p.kv_dtype} are not covered, only {', '.join(covered.kv_dtypes)}"
    if p.head_dim not in covered.head_dims:
        return f"head_dim {p.head_dim} is not covered, only {_text(covered.head_dims)}"
    if p.block_size not in covered.block_sizes:
        return f"block_size {p.block_size} is not covered, only {_text(covered.block_sizes)}"
    if p.group > MOST_HEADS:
        return f"{p.group} query heads to a KV head are not covered, at most {MOST_HEADS}"
    if p.kv_dtype != p.q_dtype and not covered.mixed:
        return f"pages of another dtype than q's ({p.q_dtype}) are not covered"
    if p.scaled and not covered.scales:
        return "pages with scales are not covered"
    named = partial(_names, device_kind or "")
    if device_kind is not None and (named(covered.never) or (covered.only and not named(covered.only))):
        return f"device {device_kind!r} is not covered, only {covered.devices}"
    wraps = implementation == "triton" and jnp.dtype(p.kv_dtype).itemsize == 1
    if wraps and TRITON_WRAPS[0] < p.pool_size <= TRITON_WRAPS[1]:
        return (
            f"pages of one byte a number that are {p.pool_size} bytes large are not covered:"
            f" Pallas-Triton's offsets wrap from {TRITON_WRAPS[0]} to {TRITON_WRAPS[1]} bytes"
        )
    return ""


def pick(platform: str, problem: Problem, device_kind: str | None) -> str:
    """The implementation for `implementation=None`. No kernel where the device is not known: Pallas compiles for none else."""
    for name in PREFERENCE.get(platform, PREFERENCE["other"]):
        if name == "xla" or (device_kind is not None and not why_not(name, problem, device_kind)):
            return name
    raise AssertionError("XLA covers everything")


def target_device_kind() -> str | None:
    """The kind of GPU that is compiled for, as far as that is known while a function is traced."""
    mesh_device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if mesh_device is not None:
        return mesh_device.device_kind if mesh_device.platform in ("gpu", "cuda") else None
    device = jax.config.jax_default_device  # a device, or the name of a platform
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return device.device_kind if getattr(device, "platform", "") in ("gpu", "cuda") else None


def is_hopper(device_kind: str) -> bool:
    """Whether the kind names a GPU of compute capability 9.0."""
    return _names(device_kind, HOPPER)


def converts_fp8(device_kind: str | None) -> bool:
    """Whether the kind names a GPU with an instruction for float8_e4m3fn (compute capability 8.9 and above)."""
    return device_kind is not None and _names(device_kind, CONVERTS_FP8)


def _names(device_kind: str, names: tuple[str, ...]) -> bool:
    return any(word in names for word in device_kind.replace("-", " ").split())


def load(implementation: str):
    """Its module. The Pallas ones are imported when they are first wanted: they take a while, and not every jaxlib has them."""
    return importlib.import_module(f".{implementation}", __package__)


def _text(values) -> str:
    return f"{values[0]} to {values[-1]}" if isinstance(values, range) else ", ".join(map(str, values))
