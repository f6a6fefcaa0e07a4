"""Which passes a step's tokens are cut into, and that it does not matter which."""

import numpy as np
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from engines import make_engine
from paged_jax import SamplingParams, check_integrity
from paged_jax.engine import passes as passes_module
from paged_jax.engine.passes import NARROW, can_cut, split_widths, takes_pass
from paged_jax.models import Llama, LlamaConfig

POWERS = tuple(2**i for i in range(9))


def passes(widths, tokens):
    """The widths that are run, in order, with the tokens of each."""
    found, left = [], tokens
    for i, width in reversed(list(enumerate(widths))):
        while takes_pass(left, width, widths[:i]):
            found.append((width, min(left, width)))
            left = max(left - width, 0)
    return found, left


@given(
    st.sets(st.integers(1, 600), min_size=1, max_size=8).map(lambda x: tuple(sorted(x))), st.data()
)
def test_every_token_is_computed_once(widths, data):
    budget = data.draw(st.integers(widths[-1], 3 * widths[-1]))
    tokens = data.draw(st.integers(0, budget))
    found, left = passes(widths, tokens)
    assert left == 0 and sum(count for _, count in found) == tokens
    assert all(count == width for width, count in found[:-1])  # only the last has padding
    assert len(found) <= 1 or can_cut(widths, budget)


@given(
    st.sets(st.integers(1, 600), min_size=1, max_size=8).map(lambda x: tuple(sorted(x))), st.data()
)
def test_a_switch_holds_every_step(widths, data):
    budget = data.draw(st.integers(widths[-1], 3 * widths[-1]))
    rows = data.draw(st.integers(1, budget))
    few, many = split_widths(widths, rows, budget)
    assert few + many == widths
    assert many or few[-1] >= budget
    # A step of a token a row reads one predicate where a width holds it.
    assert not many or not any(width <= rows for width in many) or len(many) == 1
    tokens = data.draw(st.integers(0, budget))
    if many:
        found, left = passes(many, tokens)
        assert left == 0 and sum(count for _, count in found) == tokens


def test_powers_of_two_waste_a_quarter_at_most_where_rows_cost():
    for tokens in range(1, 600):
        found, _ = passes(POWERS, tokens)
        computed = sum(width for width, _ in found)
        if tokens > NARROW:
            assert computed - tokens <= computed / 4, tokens
        else:
            assert len(found) == 1 and computed < 2 * tokens, tokens


def test_examples():
    assert passes(POWERS, 300)[0] == [(256, 256), (64, 44)]
    assert passes(POWERS, 9)[0] == [(16, 9)]
    assert passes(POWERS, 520)[0] == [(256, 256), (256, 256), (8, 8)]
    assert passes((1, 64), 130)[0] == [(64, 64), (64, 64), (64, 2)]
    assert passes((64, 512), 300)[0] == [(512, 300)]
    ladder = (1, 8, 64, 128, 256, 512)
    assert split_widths(ladder, 64, 512) == ((1, 8, 64), (128, 256, 512))
    assert split_widths((64, 512), 64, 512) == ((64, 512), ())


def test_tokens_do_not_depend_on_the_passes(monkeypatch):
    """Nor on whether loops or a switch choose them.

    Prompts are cut at any place, also within a sequence; samples share what a pass writes.
    """
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_model_len=160,
        windows=(None, 8),
    )
    model = Llama(config, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 61, 40).tolist()
    prompts = [shared + rng.integers(1, 61, n).tolist() for n in (3, 70, 1, 33, 9)]
    sizes = dict(max_num_seqs=8, max_num_batched_tokens=100, enable_prefix_caching=True)
    outputs = []
    # Other widths for a GPU, or the programs made for a CPU would be found.
    gpu = "NVIDIA H200"
    cases = [((100,), None), ((1, 8, 66, 70, 100), None), ((3, 30), None)]
    cases += [((1, 8, 67, 70, 100), gpu), ((3, 31), gpu), ((8, 100), gpu)]
    for widths, target in cases:
        monkeypatch.setattr(passes_module, "target_device_kind", lambda target=target: target)
        engine = make_engine(model, 120, 160, widths=widths, **sizes)
        ids = [
            engine.add_request(
                p, SamplingParams(temperature=t, max_tokens=9, n=1 + (t > 0), seed=5)
            )
            for p, t in zip(prompts, (0, 1, 0.5, 0, 1), strict=True)
        ]
        while engine.has_unfinished():
            engine.run(20)
        found = [[(u.index, *u.token_ids) for u in engine.take(i)] for i in ids]
        outputs.append([sorted(each) for each in found])
        assert (len(widths) > 1) == can_cut(widths, 100) or widths == (8, 100)
        assert check_integrity(engine.state) == []
    assert all(each == outputs[0] for each in outputs)
