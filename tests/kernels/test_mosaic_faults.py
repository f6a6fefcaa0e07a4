"""Faults put into the Mosaic kernel, each of which the set-up of the other tests must catch.

That is: the interpreter, its search for races, and the reference.
"""

import cases
import jax
import pytest
from cases import Heads, assert_matches, expected, make_batch

from paged_jax.kernels.paged_attention import mosaic_gpu
from paged_jax.kernels.paged_attention.scoring import Scales, Scoring

pytestmark = pytest.mark.kernels

plgpu = mosaic_gpu.plgpu
HEADS = Heads(64, 16, 1, 2, dtype="bfloat16")
WIDE = Heads(64, 16, 1, 4, dtype="bfloat16")

# The waits in the order of the kernel's text. A consumer scores the first chunk, then there are the
# loops over whole and over masked chunks and the last chunk.
OF_CONSUMER = (
    *("the queries", "the first keys", "whole keys", "values of whole keys"),
    *("masked keys", "values of masked keys", "the last values"),
)
OF_SECOND = (
    *OF_CONSUMER[:6],
    *("masked values to be cleared", "the last values", "the last values to be cleared"),
)
OF_PRODUCER = ("a place for queries", "a place for keys", "a place for values")
WAITS = {
    "one consumer": (HEADS, (*OF_CONSUMER, *OF_PRODUCER)),
    "two consumers": (WIDE, (*OF_CONSUMER, *OF_SECOND, *OF_PRODUCER)),
}
# In the interpreter copies are made in the order of their calls, and keys are waited for after the
# queries. It does not look for races of WGMMA's reads, so of the places in the rings only those for
# keys and values show a fault in the result, and the wait of a second consumer shows none.
LEFT_OUT = [1, 2, 3, 4, 5, 6, 8, 9]
OF_ROWS = len(OF_CONSUMER) + len(OF_PRODUCER)  # of the kernel for rows of one query, which is first
# Of a tile of rows the chunk before the last is masked.
TILES = [(60, 630), (40, 600), (32, 590)]
ROWS = [(1, 600), (1, 1100), (1, 300)]


def _nothing(*_, **__):
    pass


def _all_but_the_nth(function, n):
    calls = iter(range(10**6))
    return lambda *args, **kwargs: None if next(calls) == n else function(*args, **kwargs)


def _run(heads, lens, capfd):
    """Return whether the kernel ran to its end, without a race, to the result of the reference."""
    sizes = dict(num_tokens=sum(n for n, _ in lens), num_seqs=len(lens), table_width=70)
    batch = make_batch(heads, lens, **sizes)
    mosaic_gpu._run.clear_cache()
    try:
        got = cases.run(batch.arrays, None, Scales(), Scoring(heads.head_dim**-0.5), "mosaic_gpu")
        assert_matches(heads, jax.block_until_ready(got), expected(heads, batch))
    except (AssertionError, jax.errors.JaxRuntimeError):
        return False
    finally:
        mosaic_gpu._run.clear_cache()
        _forget_the_run()
    # jax 0.11.2 prints some races that it does not raise.
    return "RACE DETECTED" not in "".join(capfd.readouterr())


def _forget_the_run():
    """The interpreter keeps the state of a run that failed."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("n", LEFT_OUT)
def test_a_wait_left_out_is_caught(monkeypatch, capfd, n):
    heads, waits = WAITS["one consumer"]
    print(f"left out: the wait for {waits[n]}")
    left_out = _all_but_the_nth(plgpu.barrier_wait, OF_ROWS + n)
    monkeypatch.setattr(plgpu, "barrier_wait", left_out)
    assert not _run(heads, TILES, capfd)


@pytest.mark.parametrize("function", ["wait_smem_to_gmem", "commit_smem"])
def test_shared_memory_used_too_early_is_caught(monkeypatch, capfd, function):
    monkeypatch.setattr(plgpu, function, _nothing)
    assert not _run(HEADS, ROWS, capfd)


@pytest.mark.parametrize("consumers", WAITS)
def test_without_a_fault_nothing_is(monkeypatch, capfd, consumers):
    heads, waits = WAITS[consumers]
    calls, wait = [], plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *args: calls.append(args) or wait(*args))
    assert _run(heads, TILES, capfd)
    assert len(calls) == OF_ROWS + len(waits)
