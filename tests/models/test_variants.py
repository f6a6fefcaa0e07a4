"""Checkpoints of every kind that loads: their logits are those of transformers.

`make_expected` made the logits that are stored, of the very checkpoints that are written here.
"""

import json
import warnings

import numpy as np
import pytest

import variants
from paged_jax.models import load_model
from run_model import DATA, logits_of

QUICK = ("plain", "layer types")
DEFAULTS = json.loads((DATA / "variants" / "class-defaults.json").read_text())
EXPECTED = np.load(DATA / "variants" / "logits.npz")


def each_variant():
    """All but a few are left out of quick runs."""
    for name in variants.VARIANTS:
        is_quick = name.partition(": ")[2] in QUICK
        yield pytest.param(name, marks=() if is_quick else pytest.mark.slow)


def test_logits_of_all_variants_are_stored():
    assert len(variants.VARIANTS) >= 60
    assert EXPECTED.files == list(variants.VARIANTS)


@pytest.mark.usefixtures("no_annotation_checks")
@pytest.mark.parametrize("name", list(each_variant()))
def test_logits_are_those_of_transformers(name, tmp_path):
    variants.write(name, tmp_path, DEFAULTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of heads and leftovers, see test_hf_tensors
        model, _ = load_model(tmp_path, "float32")
    logits = logits_of(model, variants.TOKENS, is_compiled=False)
    logits = logits[list(variants.POSITIONS), : variants.COLUMNS]
    np.testing.assert_allclose(logits, EXPECTED[name], atol=2e-4, rtol=2e-4)
