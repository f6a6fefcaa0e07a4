"""The product of activations and a weight, in the form that is fast for its shape on a CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def product(x: Float[Array, "T n"], weight: Float[Array, "*out n"]) -> Float32[Array, "T *out"]:
    """Return the product over the last axes, accumulated in and returned as float32."""
    # As a plain matrix: XLA's CPU backend is 4 times slower for several output axes.
    out = _product(x, weight.reshape(-1, weight.shape[-1]))
    return out.reshape(x.shape[0], *weight.shape[:-1])


# Jitted, so that the layers of a decoder share one trace.
@jax.jit
def _product(x, matrix):
    form = choose_form(x.shape[0], *matrix.shape, x.dtype)
    if form is rows_first:
        return rows_first(x, matrix)
    return lax.platform_dependent(x, matrix, cpu=form, default=rows_first)


def choose_form(num_rows: int, size_out: int, size_in: int, dtype) -> Callable:
    """Return the form for a CPU, of those below.

    Measured on two cores with AVX-512, SmolLM2's matrices, too many weights for a cache. float32,
    time of `weight_first` by that of `rows_first` at 2, 8, 16, 32, 64 rows: 0.47, 0.52, 0.49, 0.74,
    0.83 for 576 x 1536 (out x in); 0.86, 0.97, 1.05, 1.30, 1.21 for 3072 x 576; 0.89, 0.98, 1.14,
    1.42, 1.40 for the head. On two cores with AVX2 a decoder's products took 1.2 times at 4 rows,
    0.55 at 8, 0.7 at 16 and 32. One bfloat16 row took 5 to 7 times as long as `rows_eightfold`.
    """
    if dtype == jnp.bfloat16:
        return rows_eightfold if num_rows == 1 else rows_first
    if size_in > size_out:
        return weight_first if 2 <= num_rows <= 64 else rows_first
    return weight_first if 8 <= num_rows <= 16 and size_out <= 8 * size_in else rows_first


def rows_first(x, matrix):
    """Return the product as it is written."""
    return _einsum("tn,on->to", x, matrix)


def weight_first(x, matrix):
    """Return the transpose of the product of the weight and x transposed.

    XLA's CPU backend packs its right operand anew at each call: here x, not the weight.
    """
    # Without the barrier XLA makes the other product of it, with the weight transposed.
    return lax.optimization_barrier(_einsum("on,nt->ot", matrix, x.T)).T


def rows_eightfold(x, matrix):
    """Return the product of eight times one row: XLA's product of a vector is not a fast one."""
    return _einsum("tn,on->to", jnp.broadcast_to(x, (8, x.shape[1])), matrix)[:1]


def _einsum(spec: str, a, b):
    # Without HIGHEST a float32 product is done in TF32 on GPU.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)
