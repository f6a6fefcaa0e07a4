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


def _nothing(*_, **__):
    pass


def _all_but_the_nth(function, n):
    calls = iter(range(1, 10**6))
    return lambda *args, **kwargs: None if next(calls) == n else function(*args, **kwargs)


# The kernel's waits in the order of its text: for the queries, for K, for V.
FAULTS = {
    "no wait for K": ("barrier_wait", _all_but_the_nth(plgpu.barrier_wait, 2)),
    "no wait for V": ("barrier_wait", _all_but_the_nth(plgpu.barrier_wait, 3)),
    "no wait for the stores": ("wait_smem_to_gmem", _nothing),
    "shared memory not committed": ("commit_smem", _nothing),
}


def _run(capfd):
    """Return whether the kernel ran to its end, without a race, to the result of the reference."""
    # Contexts longer than the ring of chunks, or a missed wait finds its data there anyway.
    batch = make_batch(HEADS, [(1, 600), (1, 30)], num_tokens=2, num_seqs=2, table_width=40)
    mosaic_gpu._run.clear_cache()
    try:
        got = cases.run(batch.arrays, None, Scales(), Scoring(HEADS.head_dim**-0.5), "mosaic_gpu")
        assert_matches(HEADS, jax.block_until_ready(got), expected(HEADS, batch))
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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(monkeypatch, capfd, fault):
    monkeypatch.setattr(plgpu, *FAULTS[fault])
    assert not _run(capfd)


def test_without_a_fault_nothing_is(capfd):
    assert _run(capfd)
