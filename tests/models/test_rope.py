"""Rotation frequencies and the rotation itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.models.rope import RopeConfig, inverse_frequencies, rotate, rotation


def test_default_frequencies_fall_geometrically():
    frequencies = inverse_frequencies(RopeConfig(theta=100.0), 8)
    np.testing.assert_allclose(frequencies, [1.0, 100**-0.25, 0.1, 100**-0.75], rtol=1e-6)
    assert frequencies.dtype == np.float32


def test_linear_scaling_slows_every_pair():
    slow = inverse_frequencies(RopeConfig(kind="linear", factor=4.0), 16)
    np.testing.assert_allclose(slow * 4, inverse_frequencies(RopeConfig(), 16), rtol=1e-6)


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones():
    config = RopeConfig(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=64
    )
    ratio = inverse_frequencies(RopeConfig(), 64) / inverse_frequencies(config, 64)
    wavelength = 2 * np.pi / inverse_frequencies(RopeConfig(), 64)
    np.testing.assert_allclose(ratio[wavelength < 64 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 64], 8, rtol=1e-6)
    between = ratio[(wavelength >= 64 / 4) & (wavelength <= 64)]
    assert len(between) and np.all((between >= 1) & (between <= 8)) and np.all(np.diff(between) > 0)


def test_factors_divide_each_pair():
    scaled = inverse_frequencies(RopeConfig(kind="factors", factors=(1.0, 2.0, 4.0)), 6)
    np.testing.assert_allclose(scaled * [1, 2, 4], inverse_frequencies(RopeConfig(), 6), rtol=1e-6)


def test_scores_depend_on_distance_only_and_positions_far_out_stay_exact():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 16)).astype(np.float32)

    def score(i, j):
        turned_q = rotate(jnp.asarray(q), *rotation(jnp.array([i]), RopeConfig(), 16))
        turned_k = rotate(jnp.asarray(k), *rotation(jnp.array([j]), RopeConfig(), 16))
        return float(jnp.sum(turned_q * turned_k))

    assert score(9, 4) == pytest.approx(score(5, 0), abs=1e-5)
    assert score(100_009, 100_004) == pytest.approx(score(5, 0), abs=0.05)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_rotation_keeps_the_dtype():
    x, turn = jnp.ones((1, 2, 3, 8), jnp.bfloat16), rotation(jnp.array([3]), RopeConfig(), 8)
    assert rotate(x, *turn).dtype == jnp.bfloat16


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "yarn"}, "rope kind 'yarn' is not one of default, linear, llama3, factors"),
        ({"theta": 0.0}, "must be positive"),
        ({"factor": float("nan")}, "must be positive"),
        (
            {"kind": "llama3", "low_freq_factor": 4.0},
            "high_freq_factor must exceed low_freq_factor",
        ),
        ({"kind": "factors"}, "go with kind 'factors'"),
        ({"factors": (1.0,)}, "go with kind 'factors'"),
    ],
)
def test_a_rope_config_that_cannot_be_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**config)
