"""Checks of single values, and the array idioms that the state modules share."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.arrays import ceil_div, compact, minimum, ragged_indices
from paged_jax.checks import check_bool, check_float, check_int


class OwnError(ValueError):
    """What a caller asks to be raised."""


@pytest.mark.parametrize("value", [3, np.int32(3), np.int64(3), np.uint8(3)])
def test_integers_of_python_and_numpy_become_plain_ints(value):
    number = check_int("size", value, 1, error=OwnError)
    assert number == 3 and type(number) is int


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "size=True: an int is needed, got bool"),
        (3.0, "size=3.0: an int is needed, got float"),
        ("3", "size='3': an int is needed, got str"),
        (None, "size=None: an int is needed, got NoneType"),
        (0, "size=0: must be at least 1"),
        (2**30 + 1, f"size={2**30 + 1}: must be at most {2**30}"),
        (np.int8(-4), "size=-4: must be at least 1"),
    ],
)
def test_an_int_that_is_not_accepted_is_named(value, says):
    with pytest.raises(OwnError) as error:
        check_int("size", value, 1, error=OwnError)
    assert str(error.value) == says
    assert check_int("size", 2**70, 1, None, error=OwnError) == 2**70


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, 10**400, "1", True, None, 1j])
def test_a_float_that_is_not_accepted_is_named(value):
    with pytest.raises(OwnError, match="share="):
        check_float("share", value, "0 or above", lambda x: x >= 0, error=OwnError)
    assert check_float("share", np.float32(0.5), "", lambda x: True, error=OwnError) == 0.5


@pytest.mark.parametrize("value", [0, 1, None, "yes", np.bool_(True)])
def test_a_bool_is_a_bool(value):
    with pytest.raises(OwnError, match=r"flag=.*: a bool is needed"):
        check_bool("flag", value, error=OwnError)
    assert check_bool("flag", True, error=OwnError) is True


@pytest.mark.parametrize("counts", [[2, 0, 3, 0], [0, 0, 0, 0], [0, 7, 0, 0], [1, 2, 3, 1]])
def test_ragged_indices_enumerate_what_each_owner_has(counts):
    owner, rank, is_valid = ragged_indices(jnp.asarray(counts), 7)
    entries = [(i, k) for i, count in enumerate(counts) for k in range(count)]
    assert is_valid.tolist() == [True] * len(entries) + [False] * (7 - len(entries))
    assert list(zip(owner.tolist(), rank.tolist(), strict=True))[: len(entries)] == entries
    assert all(0 <= i < len(counts) for i in owner.tolist()), "padding may be used as an index"


@pytest.mark.parametrize("chosen", [[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1]])
def test_compact_moves_the_chosen_together(chosen):
    values = [5, 7, 2, 9]
    moved, count = compact(jnp.asarray(values), jnp.asarray(chosen, bool), -1)
    kept = [value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen]
    assert moved.tolist() == kept + [-1] * (4 - len(kept)) and int(count) == len(kept)


def test_ints_stay_on_the_host():
    assert type(minimum(3, 4)) is int and type(ceil_div(7, 4)) is int and ceil_div(7, 4) == 2
    assert int(minimum(jnp.int32(3), 4)) == 3 and int(ceil_div(jnp.int32(8), 4)) == 2
