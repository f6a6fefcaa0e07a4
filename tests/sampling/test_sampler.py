"""Sampling: the kept sets of a plain sort in float64, draws by their probabilities, and nothing of
a neighbour's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling import sampler
from paged_jax.sampling.rows import SamplingRows
from paged_jax.sampling.sampler import sample

VOCABULARIES = [
    50,
    300,
    1001,
]  # fewer than the candidates, more, many more; none a multiple of the draw's block
run = jax.jit(sample)
threshold = jax.jit(sampler.filter_threshold)


def make_rows(
    count, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_len=0, stop_ids=()
):
    def fill(value, dtype):
        return np.broadcast_to(np.asarray(value), (count,)).astype(dtype)

    stops = np.full((count, 4), -1, np.int32)
    stops[:, : len(stop_ids)] = stop_ids
    parameters = dict(
        temperature=fill(temperature, np.float32),
        top_k=fill(top_k, np.int32),
        top_p=fill(top_p, np.float32),
        min_p=fill(min_p, np.float32),
    )
    return SamplingRows(
        parameters=parameters,
        seed=fill(seed, np.uint32),
        min_len=fill(min_len, np.int32),
        stop_ids=stops,
    )


def draw(logits, rows, lengths=1, wanted=True):
    count = len(logits)
    lengths, wanted = (np.broadcast_to(x, (count,)) for x in (np.int32(lengths), wanted))
    tokens, logprobs = run(np.asarray(logits, np.float32), rows, lengths, wanted)
    return np.asarray(tokens), np.asarray(logprobs)


def kept_by_sorting(scaled, top_k, top_p, min_p):
    """The set that min_p, then top_k, then top_p over the renormalised rest leave; ties at a
    threshold all stay.
    """
    x = scaled.astype(np.float64)
    kept = x >= np.log(min_p) if min_p > 0 else np.ones(len(x), bool)
    if 0 < top_k < len(x):
        kept &= x >= np.sort(np.where(kept, x, -np.inf))[-top_k]
    if top_p < 1:
        order = np.sort(x[kept])[::-1]
        reached = np.cumsum(np.exp(order)) / np.sum(np.exp(order)) >= top_p
        kept &= x >= order[np.argmax(reached)]
    return kept


def adversarial_rows(vocab, seed):
    """Logits of many shapes, their maximum 0."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(8, vocab))
    rows = [
        normal[0],
        normal[1] * 10,
        normal[2] * 0.1,
        np.zeros(vocab),  # flat
        np.round(normal[3] * 2),  # full of ties
        np.where(rng.random(vocab) < 0.5, -np.inf, normal[4]),
        np.where(np.arange(vocab) == 7, 0.0, -60.0),  # all the mass in one
        np.where(np.arange(vocab) < vocab // 3, 0.0, -1e-6 * np.arange(vocab)),
        -0.01 * np.arange(vocab),
        np.sort(normal[5]),
        -(2.0 ** (np.arange(vocab) % 30)),
        normal[6] * 1e4,
    ]
    rows = np.asarray(rows, np.float32)
    return rows - rows.max(axis=1, keepdims=True)


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 128},
    {"top_k": 129},
    {"top_k": 290},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.95, "min_p": 0.001},
    {"top_p": 0.7, "min_p": 0.3},
]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_kept_set_is_that_of_a_full_sort(vocab):
    exact = cases = 0
    for seed, options in enumerate(FILTERS):
        scaled = adversarial_rows(vocab, seed)
        found = np.asarray(
            threshold(scaled, make_rows(len(scaled), **options), np.ones(len(scaled), bool))
        )
        top_k, top_p, min_p = (
            np.float64(np.float32(options.get(n, d)))
            for n, d in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        )
        for row, t in zip(scaled, found, strict=True):
            kept = row >= t
            # Float32 sums may put a sum that all but equals top_p on either side of it; no other
            # freedom.
            least, most = (
                kept_by_sorting(
                    row, int(top_k), top_p * (1 + sign) if top_p < 1 else 1, min_p * (1 - sign)
                )
                for sign in (-3e-6, 3e-6)
            )
            assert np.all(least <= kept) and np.all(kept <= most), (
                options,
                kept.sum(),
                least.sum(),
                most.sum(),
            )
            assert kept[np.argmax(row)]
            exact, cases = exact + np.array_equal(least, most), cases + 1
    assert exact > 0.9 * cases


def test_rows_that_ask_for_no_filter_keep_all_beside_rows_that_do():
    scaled = adversarial_rows(300, 1)[:4]
    rows = make_rows(4, top_k=[0, 3, 3, 500], top_p=[1.0, 1.0, 0.5, 1.0])
    found = np.asarray(threshold(scaled, rows, np.asarray([True, True, False, True])))
    assert found[0] == found[2] == found[3] == -np.inf
    assert (scaled[1] >= found[1]).sum() == 3


def test_the_head_by_columns_is_the_head_of_a_sort():
    for vocab in (128, 300, 1001, 2500):
        x = np.round(np.random.default_rng(vocab).normal(size=(5, vocab)) * 20).astype(np.float32)
        x[0] = -np.arange(vocab)  # each of the largest in a column of its own
        assert np.array_equal(sampler._head(jnp.asarray(x), 128), np.sort(x)[:, ::-1][:, :128])


# ---------------------------------------------------------------- draws

DRAWS = 4096


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 200, "top_p": 0.97, "min_p": 0.001, "temperature": 1.3},
    ],
)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_tokens_come_as_often_as_their_probabilities_say(options, by):
    """Over positions of one request, and over requests at one position: chi-square within six
    standard deviations.
    """
    logits = (np.random.default_rng(3).normal(size=1001) * 2).astype(np.float32)
    each = np.arange(DRAWS)
    rows = make_rows(DRAWS, seed=each if by == "seed" else 11, **options)
    tokens, _ = draw(
        np.broadcast_to(logits, (DRAWS, 1001)), rows, lengths=each if by == "position" else 5
    )
    scaled = logits / np.float32(options.get("temperature", 1))
    scaled -= scaled.max()
    kept = kept_by_sorting(
        scaled,
        *(
            options.get(name, default)
            for name, default in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        ),
    )
    weights = np.where(kept, np.exp(scaled.astype(np.float64)), 0)
    expected = DRAWS * weights / weights.sum()
    seen = np.bincount(tokens, minlength=1001)
    assert not seen[~kept].any()
    common = expected >= 5
    cells = (
        np.append(seen[common], seen[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    observed, mean = (cell[cells[1] > 0] for cell in cells)
    freedom = len(mean) - 1
    assert np.sum((observed - mean) ** 2 / mean) < freedom + 6 * np.sqrt(2 * freedom)


def test_a_token_of_weight_zero_is_never_drawn(monkeypatch):
    """Also where the running sum rises by rounding at it, as it does where partial sums are added
    in a tree.
    """

    def add_in_a_tree(x, axis):
        return jax.lax.associative_scan(jnp.add, x, axis=axis)

    rng = np.random.default_rng(0)
    weights = np.where(rng.random((400, 256)) < 0.8, 0, rng.random((400, 256))).astype(np.float32)
    sums = np.asarray(jax.jit(add_in_a_tree, static_argnums=1)(weights, 1))
    assert np.any((weights[:, 1:] == 0) & (sums[:, 1:] > sums[:, :-1]))
    monkeypatch.setattr(jnp, "cumsum", add_in_a_tree)
    invert = jax.jit(lambda w, u: sampler._invert(w, u))
    there = (sums / sums[:, -1:]).astype(np.float32)
    for position in range(256):
        for nudge in (-1, 0, 1):
            uniform = np.clip(
                there[:, position] + nudge * np.spacing(there[:, position]), 0, 1 - 2**-24
            )
            index = np.asarray(invert(weights, uniform.astype(np.float32)))
            assert np.all(weights[np.arange(400), index] > 0)


def test_the_second_stage_stays_inside_the_vocabulary():
    weights = np.zeros((3, 300), np.float32)
    weights[0, 299], weights[1, 255], weights[2, 256] = 1e-30, 1, 1
    for uniform in (0.0, 0.5, 1 - 2**-24):
        tokens = sampler._draw(jnp.asarray(weights), jnp.full((3, 2), uniform))
        assert tokens.tolist() == [299, 255, 256]


# ---------------------------------------------------------------- greedy, neighbours, seeds


def test_greedy_takes_the_first_maximum_beside_rows_that_sample():
    logits = adversarial_rows(300, 5)
    logits[3, :9] = -1  # the flat row's first maximum is the ninth
    warm = np.arange(len(logits)) % 2 * 0.8
    tokens, logprobs = draw(logits, make_rows(len(logits), temperature=warm, top_k=3))
    alone, alone_logprobs = draw(logits, make_rows(len(logits), temperature=0))
    best = np.argmax(logits, axis=1)
    assert np.array_equal(alone, best) and np.array_equal(tokens[::2], best[::2])
    assert np.array_equal(logprobs[::2], alone_logprobs[::2])
    assert best[3] == 9


def mixed_requests(count, vocab):
    rng = np.random.default_rng(count)
    rows = make_rows(
        count,
        temperature=rng.choice([0, 0.7, 1, 2], count),
        top_k=rng.choice([0, 1, 20, 200], count),
        top_p=rng.choice([0.5, 0.95, 1], count),
        min_p=rng.choice([0, 0.02], count),
        seed=rng.integers(2**32, size=count),
        min_len=rng.integers(0, 9, count),
        stop_ids=[3, 4],
    )
    return (
        (rng.normal(size=(count, vocab)) * 2).astype(np.float32),
        rows,
        rng.integers(0, 9, count).astype(np.int32),
    )


def test_a_row_does_not_depend_on_its_neighbours_or_on_the_size_of_the_batch():
    logits, rows, lengths = mixed_requests(16, 1001)
    tokens, logprobs = draw(logits, rows, lengths)
    order = np.random.default_rng(1).permutation(16)
    shuffled = draw(logits[order], jax.tree.map(lambda x: x[order], rows), lengths[order])
    assert np.array_equal(tokens[order], shuffled[0]) and np.array_equal(
        logprobs[order], shuffled[1]
    )
    for k in range(16):
        alone = draw(
            logits[k : k + 1], jax.tree.map(lambda x, k=k: x[k : k + 1], rows), lengths[k : k + 1]
        )
        assert tokens[k] == alone[0][0]
        np.testing.assert_allclose(
            logprobs[k], alone[1][0], rtol=1e-6
        )  # another shape may add in another order


def test_rows_not_wanted_do_not_change_those_that_are():
    logits, rows, lengths = mixed_requests(16, 1001)
    wanted = np.arange(16) % 3 == 0
    tokens, _ = draw(logits, rows, lengths)
    part, _ = draw(logits, rows, lengths, wanted)
    assert np.array_equal(tokens[wanted], part[wanted])
    assert np.all((part >= 0) & (part < 1001))


def test_the_same_seed_and_position_give_the_same_token_and_others_differ():
    logits = np.zeros((16, 1001), np.float32)
    same, _ = draw(logits, make_rows(16, seed=7), 3)
    assert len(set(same.tolist())) == 1
    seeds, _ = draw(logits, make_rows(16, seed=np.arange(16)), 3)
    positions, _ = draw(logits, make_rows(16, seed=7), np.arange(16))
    assert len(set(seeds.tolist())) > 12 and len(set(positions.tolist())) > 12
    assert positions[3] == same[0] and seeds[7] == same[0]
    assert draw(logits, make_rows(16, seed=2**32 - 1), 3)[0][0] != same[0]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_flat():
    logits, _, _ = mixed_requests(16, 1001)
    tokens, _ = draw(logits, make_rows(16, temperature=1e-5, seed=np.arange(16)))
    assert np.array_equal(tokens, np.argmax(logits, axis=1))
    tokens, _ = draw(
        np.broadcast_to(logits[0], logits.shape),
        make_rows(16, temperature=1e30, seed=np.arange(16)),
    )
    assert len(set(tokens.tolist())) > 12


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 1e30])
def test_at_any_temperature_only_what_is_allowed_is_drawn(temperature):
    """A quotient that passes float32 must not become a NaN, nor a masked token come back."""
    logits = np.random.default_rng(3).standard_normal((8, 97), dtype=np.float32) * 30
    best = logits.argmax(1)
    rows = make_rows(
        8, temperature=temperature, seed=np.arange(8), min_len=9, stop_ids=(0, int(best[0]))
    )
    masked = logits.copy()
    masked[:, [0, best[0]]] = -np.inf
    tokens = np.asarray(run(logits, rows, np.full(8, 5), np.ones(8, bool))[0])
    assert not np.isin(tokens, [0, best[0]]).any()
    if temperature < 1:
        assert tokens.tolist() == masked.argmax(1).tolist()


def test_the_logprob_is_that_of_the_raw_logits():
    logits, rows, lengths = mixed_requests(16, 1001)
    tokens, logprobs = draw(logits, rows, lengths)
    wide = logits.astype(np.float64)
    expected = wide[np.arange(16), tokens] - np.log(np.sum(np.exp(wide), axis=1))
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


# ---------------------------------------------------------------- stop ids, broken rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_may_not_come_before_the_row_is_long_enough(temperature):
    logits = np.zeros((16, 1001), np.float32)
    logits[:, [5, 8, 1000]] = [
        30,
        29,
        28,
    ]  # 1000 is the last token: the padding -1 must not mask it
    lengths = np.arange(16)
    rows = make_rows(16, temperature=temperature, min_len=10, stop_ids=[5, 8])
    tokens, logprobs = draw(logits, rows, lengths)
    assert np.all(tokens[:10] == 1000) and np.all(logprobs[:10] < -1.9)
    assert np.all(np.isin(tokens[10:], [5, 8, 1000])) and (
        temperature > 0 or np.all(tokens[10:] == 5)
    )
    assert np.all(
        draw(logits, make_rows(16, temperature=0, min_len=10), lengths)[0] == 5
    )  # no stop ids: nothing to mask
    late, _ = draw(logits, rows, lengths, wanted=lengths >= 10)
    assert np.array_equal(late[10:], tokens[10:])


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}, {"top_k": 500}]
)
def test_a_row_of_nan_gives_a_token_inside_the_vocabulary_and_harms_no_other(options):
    logits, _, lengths = mixed_requests(16, 1001)
    rows = make_rows(16, seed=np.arange(16), **options)
    healthy, _ = draw(logits, rows, lengths)
    broken = logits.copy()
    broken[2], broken[5, 17] = np.nan, np.nan
    tokens, _ = draw(broken, rows, lengths)
    assert np.all((tokens >= 0) & (tokens < 1001))
    others = ~np.isin(np.arange(16), [2, 5])
    assert np.array_equal(tokens[others], healthy[others])


# ---------------------------------------- what is not asked for is not paid for


def inner_programs(equation):
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else [value]:
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def primitives(jaxpr, stop=()):
    """Names of what a program executes, not descending into those in `stop`."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name not in stop:
            for inner in inner_programs(equation):
                yield from primitives(inner, stop)


def branches(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            return [branch.jaxpr for branch in equation.params["branches"]]
        for inner in inner_programs(equation):
            if found := branches(inner):
                return found
    return None


def test_only_rows_that_filter_make_a_step_look_for_the_head():
    arguments = (
        np.zeros((4, 300), np.float32),
        make_rows(4),
        np.zeros(4, np.int32),
        np.ones(4, bool),
    )
    whole = jax.make_jaxpr(sample)(*arguments).jaxpr
    costly = {"top_k", "sort", "cumsum", "while", "random_fold_in"}
    assert costly <= set(primitives(whole)) | {"sort"}
    assert not costly & set(primitives(whole, stop=("cond",)))
    greedy, special = branches(whole)
    assert not costly & set(primitives(greedy))
    assert not {"top_k", "sort", "while"} & set(primitives(special, stop=("cond",)))
