"""What an engine starts from is looked at before anything is computed with it."""

import jax
import pytest
from flax import nnx

from engines import windowed_llama
from paged_jax import Engine, EngineConfig
from paged_jax.errors import ConfigError

GRAPHDEF, PARAMS = nnx.split(windowed_llama())
SHAPES = jax.eval_shape(lambda: PARAMS)
CONFIG = EngineConfig(16, 32, 2, 8)


def test_params_that_are_only_shapes_are_refused():
    with pytest.raises(ConfigError, match=r"params.*ShapeDtypeStruct.*; an array with numbers"):
        Engine(GRAPHDEF, SHAPES, CONFIG)


def test_load_must_be_a_function(no_annotation_checks):
    with pytest.raises(ConfigError, match=r"load=5: a function that returns the params is needed"):
        Engine(GRAPHDEF, SHAPES, CONFIG, load=5)


WRONG = {
    "nothing": (lambda: None, "is missing"),
    "other shapes": (lambda: jax.tree.map(lambda x: x[:1], PARAMS), "the model has"),
    "another dtype": (lambda: jax.tree.map(lambda x: x.astype("float16"), PARAMS), "float16"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_was_loaded_must_be_the_models(what, no_annotation_checks):
    load, message = WRONG[what]
    with pytest.raises(ConfigError, match=f"params.*{message}"):
        Engine(GRAPHDEF, SHAPES, CONFIG, load=load)


def test_later_widths_are_named():
    with pytest.raises(ConfigError, match=r"later_widths=\(9, 3\): an ascending tuple"):
        Engine(GRAPHDEF, PARAMS, CONFIG, widths=(4,), later_widths=(9, 3))
