"""The device that a program is compiled for, as far as it is known while it is traced."""

import jax


def target_device_kind() -> str | None:
    """Return the kind of GPU that is compiled for, if it is known while a function is traced."""
    mesh_device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if mesh_device is not None:
        return mesh_device.device_kind if mesh_device.platform in ("gpu", "cuda") else None
    device = jax.config.jax_default_device  # a device, or the name of a platform
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return device.device_kind if getattr(device, "platform", "") in ("gpu", "cuda") else None
