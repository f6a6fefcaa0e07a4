"""What checks the product's annotations, shapes included, while the tests run (see conftest).

Left out are dataclasses made of anything but arrays of JAX: a state that was fetched holds NumPy
arrays, a tree of shardings holds shardings. A test that passes arguments of a wrong type uses the
fixture `no_annotation_checks`.
"""

import jax
import numpy as np
from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int counts as a float


def check(function):
    """Check calls of a function, or of the `__init__` of a dataclass."""
    checked = checker(function)
    if not function.__qualname__.endswith(".__init__"):
        return checked

    def check_init(*args, **kwargs):
        leaves = jax.tree.leaves((args[1:], kwargs))
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        others = (np.ndarray, np.generic, jax.ShapeDtypeStruct, jax.sharding.PartitionSpec)
        if arrays and not any(isinstance(leaf, others) for leaf in leaves):
            checked(*args, **kwargs)

    return check_init
