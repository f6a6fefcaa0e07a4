"""Compiling for a CUDA GPU where there is none: the program text and sizes are those that a GPU
would run.
"""

import functools
import importlib.metadata
import pathlib
import tempfile

import jax
from jax.experimental import topologies

from compiled import thunks

DATA = pathlib.Path(__file__).parents[1] / "data"  # devices' published limits
WHEELS = [
    ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
    ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
]


def missing_wheels() -> str:
    """Why nothing can be compiled for CUDA here, or an empty string."""
    installed = {
        (d.metadata["Name"] or "").lower().replace("_", "-")
        for d in importlib.metadata.distributions()
    }
    if any(installed.issuperset(wheels) for wheels in WHEELS):
        return ""
    lacking = [name for name in WHEELS[0] if name not in installed]
    missing = ", ".join(lacking)
    return f"not compiled for CUDA: {missing} not installed (make test-cuda-compile installs them)"


@functools.cache
def devices(name: str, count: int = 1):
    """Devices that `data/name.txtpb` describes."""
    limits = (DATA / f"{name}.txtpb").read_text()
    shape = f"1x1x{count}"
    return topologies.get_topology_desc(
        name, platform="cuda", target_config=limits, topology=shape
    ).devices


def compile_for(name: str, f, *args, donate_argnums=(), options=None):
    """`f` compiled for one device; `args` are arrays or ShapeDtypeStructs, `options` XLA's."""
    (target,) = devices(name)
    mesh = jax.sharding.Mesh([target], ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    specs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args
    )
    with jax.default_device(target):
        return jax.jit(f, donate_argnums=donate_argnums).lower(*specs).compile(options)


def compile_sharded(name: str, count: int, f, specs, out_spec, *args):
    """`f` compiled inside `shard_map` over the axis "x" of `count` devices; `specs` say how `args`
    and the result are cut.
    """
    mesh = jax.sharding.Mesh(devices(name, count), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(x, spec):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = jax.tree.map(place, args, specs)
    with jax.default_device(devices(name, count)[0]):
        return (
            jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_spec))
            .lower(*placed)
            .compile()
        )


def compile_for_h200(f, *args, donate_argnums=(), graphs: str | None = None):
    """`compile_for` an H200; also returns the thunks. `graphs`: the kinds that a graph may have,
    XLA's own list where None.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder}
        options |= {"xla_gpu_enable_command_buffer": graphs} if graphs else {}
        executable = compile_for("h200", f, *args, donate_argnums=donate_argnums, options=options)
        (dumped,) = pathlib.Path(folder).glob(thunks.DUMPED)
        return executable, thunks.read(dumped.read_text())
