"""Compiling for a CUDA GPU where there is none: the program text and sizes are those that a GPU would run."""

import importlib.metadata
import pathlib

import jax
from jax.experimental import topologies

H200 = pathlib.Path(__file__).parents[1] / "data" / "h200.txtpb"  # the device's published limits
WHEELS = [("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"), ("jax-cuda13-plugin", "jax-cuda13-pjrt")]


def missing_wheels() -> str:
    """Why nothing can be compiled for CUDA here, or an empty string."""
    installed = {(d.metadata["Name"] or "").lower().replace("_", "-") for d in importlib.metadata.distributions()}
    if any(installed.issuperset(wheels) for wheels in WHEELS):
        return ""
    lacking = [name for name in WHEELS[0] if name not in installed]
    return f"not compiled for CUDA: {', '.join(lacking)} not installed (make test-cuda-compile installs them)"


def compile_for_h200(f, *args, donate_argnums=()):
    """`f` compiled for one H200; `args` are arrays or ShapeDtypeStructs."""
    target = topologies.get_topology_desc("h200", platform="cuda", target_config=H200.read_text(), topology="1x1x1")
    device = target.devices[0]
    mesh = jax.sharding.Mesh([device], ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args)
    with jax.default_device(device):
        return jax.jit(f, donate_argnums=donate_argnums).lower(*specs).compile()
