"""An operation that no platform has: lowering a program that needs it raises, with the reason.

What platform a function is compiled for may be known no earlier than that, as when it is compiled
ahead of time.
"""

from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array

_refuse_p = Primitive("refuse")
_refuse_p.def_abstract_eval(lambda x, *, reason: x)


def refuse(x: Array, reason: str) -> Array:
    """Return an array like `x` that raises NotImplementedError(reason) when it is lowered."""
    return _refuse_p.bind(x, reason=reason)


@_refuse_p.def_impl
def _evaluate(x, *, reason: str):
    raise NotImplementedError(reason)


def _lower(context, x, *, reason: str):
    raise NotImplementedError(reason)


mlir.register_lowering(_refuse_p, _lower)
