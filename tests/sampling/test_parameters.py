"""Sampling parameters are checked when made; the message names the argument, its value and what is
accepted.
"""

import dataclasses
import inspect
import math

import numpy as np
import pytest

from paged_jax import generate
from paged_jax.errors import InvalidRequestError, PagedJaxError
from paged_jax.sampling.parameters import PARAMETERS, SamplingParams
from paged_jax.sampling.rows import init_sampling_rows


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("temperature", -0.01, "must be from 0 to 1e+30"),
        ("temperature", math.inf, "must be from 0 to 1e+30"),
        ("temperature", 1e39, "must be from 0 to 1e+30"),
        ("temperature", math.nan, "must be from 0 to 1e+30"),
        ("top_k", -2, "must be at least -1"),
        ("top_p", 0.0, "must be in (0, 1] as a float32"),
        ("top_p", -0.5, "must be in (0, 1] as a float32"),
        ("top_p", 1.01, "must be in (0, 1] as a float32"),
        ("top_p", math.nan, "must be in (0, 1] as a float32"),
        ("min_p", -0.01, "must be in [0, 1]"),
        ("min_p", 1.01, "must be in [0, 1]"),
        ("seed", -(2**63) - 1, f"must be at least {-(2**63)}"),
        ("max_tokens", 0, "must be at least 1"),
        ("max_tokens", -5, "must be at least 1"),
        ("min_tokens", -1, "must be at least 0"),
        ("min_tokens", 17, "must be at most max_tokens=16"),
    ],
)
def test_a_value_out_of_range_is_refused(name, value, accepted):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"{name}={value}: {accepted}"
    assert isinstance(error.value, PagedJaxError) and isinstance(error.value, ValueError)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", ["0.5", None, True, [0.5], 1j])
def test_a_number_is_needed(name, value):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"{name}={value!r}: a number is needed, got {type(value).__name__}"


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "min_tokens", "seed"])
@pytest.mark.parametrize("value", ["3", 3.0, True, [3]])
def test_an_int_is_needed(name, value):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"{name}={value!r}: an int is needed, got {type(value).__name__}"


@pytest.mark.parametrize("value", [1, "yes", None])
def test_ignore_eos_is_a_bool(value):
    with pytest.raises(InvalidRequestError, match=f"ignore_eos={value!r}: a bool is needed"):
        SamplingParams(ignore_eos=value)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ("12", "stop_token_ids='12': a sequence of token ids is needed"),
        (b"12", "stop_token_ids=b'12': a sequence"),
        (12, "stop_token_ids=12: a sequence"),
        ({1}, "stop_token_ids={1}: a sequence"),
        ([1, -1], "stop_token_ids=-1: must be at least 0"),
        ([1, "2"], "stop_token_ids='2': an int is needed, got str"),
        ([1.0], "stop_token_ids=1.0: an int is needed, got float"),
    ],
)
def test_stop_token_ids_are_a_sequence_of_token_ids(ids, says):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(stop_token_ids=ids)
    assert str(error.value).startswith(says)


def test_the_ends_of_every_range_are_accepted():
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, max_tokens=1, min_tokens=0, seed=0)
    SamplingParams(
        temperature=1e9, top_k=2**40, top_p=1e-9, min_p=1, max_tokens=7, min_tokens=7, seed=-(2**63)
    )
    SamplingParams(max_tokens=None, min_tokens=1000, seed=2**64)


def test_numbers_become_plain_python():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        top_p=1,
        min_p=np.float64(0.1),
        seed=np.uint32(7),
        max_tokens=np.int32(4),
        min_tokens=np.int8(2),
        stop_token_ids=[np.int32(9), 4],
    )
    values = dataclasses.astuple(params)
    assert values == (0.5, 3, 1.0, 0.1, 7, 4, 2, False, (9, 4), 1)
    assert [type(value) for value in values] == [
        float,
        int,
        float,
        float,
        int,
        int,
        int,
        bool,
        tuple,
        int,
    ]
    assert all(type(token) is int for token in params.stop_token_ids)


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_of_zero_or_minus_one_is_off(off):
    assert SamplingParams(top_k=off).top_k == 0


def test_stop_token_ids_are_named_once_in_their_order():
    assert SamplingParams(stop_token_ids=[5, 3, 5, 9, 3]).stop_token_ids == (5, 3, 9)


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1, False)]
)
def test_a_temperature_below_a_hundred_thousandth_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_parameters_are_frozen_hashable_and_equal_by_value():
    params = SamplingParams(top_k=-1, stop_token_ids=[1, 2, 1])
    assert (
        params == SamplingParams(stop_token_ids=(1, 2))
        and len({params, SamplingParams(stop_token_ids=(1, 2))}) == 1
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    with pytest.raises(InvalidRequestError, match="top_k=-7"):
        dataclasses.replace(params, top_k=-7)


def test_the_table_and_what_is_made_from_it_agree():
    """Each row is a field of SamplingParams, an argument of `generate` and an array of the rows."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    arguments = inspect.signature(generate).parameters
    rows = init_sampling_rows(3, 2)
    assert list(rows.parameters) == [parameter.name for parameter in PARAMETERS]
    for parameter in PARAMETERS:
        assert parameter.name in fields and parameter.name in arguments
        default = getattr(SamplingParams(), parameter.name)
        assert arguments[parameter.name].default == default == parameter.check(default)
        array = rows.parameters[parameter.name]
        assert array.dtype == parameter.dtype and array.tolist() == [parameter.neutral] * 3
        assert parameter.accepts(parameter.neutral)


@pytest.mark.parametrize(
    ("name", "value", "canonical"),
    [
        ("temperature", 9e-6, 0),
        ("temperature", 1e-5, 1e-5),
        ("top_k", -1, 0),
        ("top_k", 2**40, 2**31 - 1),
    ],
)
def test_equal_values_have_one_form(name, value, canonical):
    (parameter,) = (p for p in PARAMETERS if p.name == name)
    assert parameter.check(value) == getattr(SamplingParams(**{name: value}), name) == canonical
    clamped = np.asarray([min(value, 2**31 - 1)], np.float64 if name == "temperature" else np.int32)
    assert parameter.canonical(clamped).tolist() == [canonical]
