import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.kernels.running_sum import running_sum


@pytest.mark.parametrize("size", [1, 3, 256, 257, 1000])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_it_is_the_cumulative_sum_and_wraps_like_it(size, dtype):
    x = np.random.default_rng(size).integers(0, 2**31, size).astype(dtype)
    got = running_sum(jnp.asarray(x))
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, np.cumsum(x, dtype=x.dtype))
