"""Which implementation runs: by platform, device, dtype and shape. Deterministic; nothing is timed."""

import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

# The first that covers the problem is taken. XLA covers everything.
PREFERENCE = {"cpu": ("xla",), "cuda": ("mosaic_gpu", "triton", "xla"), "other": ("xla",)}

#                        dtype of q                          dtype of the pages               head_dim
COVERAGE = {
    "triton": (
        ("float32", "bfloat16", "float16"),
        ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"),
        range(1, 257),
    ),
    "mosaic_gpu": (("bfloat16", "float16"), ("bfloat16", "float16"), (64, 128)),
}
MOSAIC_PAGES = (8, 16, 32, 64)  # a page is one TMA box, and a chunk a whole number of pages
MOST_HEADS = 64  # query heads of one KV head: rows of one program
CONVERTS_FP8 = ("L4", "L40", "L40S", "4090", "H100", "H200", "GH200", "H800", "H20", "B200", "GB200", "B300", "GB300")
HOPPER = ("H100", "H200", "GH200", "H800", "H20")

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
    q_dtypes, kv_dtypes, head_dims = COVERAGE[implementation]
    p = problem
    if p.q_dtype not in q_dtypes:
        return f"q of dtype {p.q_dtype} is not covered, only {', '.join(q_dtypes)}"
    if p.kv_dtype not in kv_dtypes:
        return f"pages of dtype {p.kv_dtype} are not covered, only {', '.join(kv_dtypes)}"
    if p.head_dim not in head_dims:
        return f"head_dim {p.head_dim} is not covered, only {_text(head_dims)}"
    if p.group > MOST_HEADS:
        return f"{p.group} query heads to a KV head are not covered, at most {MOST_HEADS}"
    if implementation == "triton":
        if jnp.dtype(p.kv_dtype).itemsize == 1 and TRITON_WRAPS[0] < p.pool_size <= TRITON_WRAPS[1]:
            return (
                f"pages of one byte a number that are {p.pool_size} bytes large are not covered:"
                f" Pallas-Triton's offsets wrap from {TRITON_WRAPS[0]} to {TRITON_WRAPS[1]} bytes"
            )
        return ""
    if p.kv_dtype != p.q_dtype or p.scaled:
        return f"pages of another dtype than q's ({p.q_dtype}), and pages with scales, are not covered"
    if p.block_size not in MOSAIC_PAGES:
        return f"block_size {p.block_size} is not covered, only {_text(MOSAIC_PAGES)}"
    if device_kind is not None and not is_hopper(device_kind):
        return f"device {device_kind!r} is not covered, only Hopper (sm_90a)"
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
