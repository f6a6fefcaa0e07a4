"""What the tests of models share."""

import jaxtyping
import pytest


@pytest.fixture
def no_annotation_checks():
    """Turn the checks of annotations off, as users have it: for arguments of a wrong type.

    Where the tests run with jaxtyping's import hook, an annotation would raise before the
    function does.
    """
    was_off = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", was_off)
