"""What the compiled step and the compiled `generate` must not do, seen in the programs that XLA
makes for a CPU.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from compiled import programs
from compiled.checks import page_faults, steady_faults, whole_array_ops
from compiled.program import read
from paged_jax import generate
from toy_decoder import ToyDecoder, random_prompts

# The same program text three times sooner: only what LLVM makes of it is slower.
QUICK = {"xla_backend_optimization_level": 0}
KINDS = {"step": (programs.step_program, (1,)), "generate": (programs.generate_program, ())}


@pytest.mark.parametrize(
    ("kind", "windows"), [("step", "full"), ("step", "everything"), ("generate", "full and window")]
)
def test_no_loop_touches_a_whole_array(kind, windows, record_property):
    make, donated = KINDS[kind]
    program, args = make(windows)
    compiled = jax.jit(program, donate_argnums=donated).lower(*args).compile(compiler_options=QUICK)
    found = read(compiled.as_text())
    size = compiled.memory_analysis().temp_size_in_bytes
    record_property(
        "measured", f"{kind}, {windows}, jax {jax.__version__}: {size:,} bytes of temporaries"
    )
    assert len(found.loops("steps")) == 1 and len(found.loops("events")) == 1
    assert page_faults(found, programs.NUM_BLOCKS, programs.PAGE_SIZE) == []
    assert steady_faults(found, programs.NUM_BLOCKS) == []
    if kind == "step":  # nor is a donated page copied on the way into the loops or out
        assert [
            line
            for i, line in whole_array_ops(
                found, [found.entry], lambda s: s.size >= programs.PAGE_SIZE
            )
        ] == []
        assert size < programs.PAGE_SIZE


class CountsTraces(ToyDecoder):
    """Counts how often it is traced."""

    traces = 0

    def __call__(self, *args):
        CountsTraces.traces += 1
        return super().__call__(*args)


def test_calls_of_equal_shapes_trace_once_whatever_the_prompts():
    graphdef, params = nnx.split(CountsTraces())
    for seed in range(4):
        prompts = jnp.asarray(random_prompts(seed, [9] * 3))
        lens = jnp.asarray([1 + seed, 9, 4])
        key = jax.random.key(seed)
        filters = {"temperature": seed / 2, "top_k": seed}
        out = generate(
            graphdef,
            params,
            prompts,
            lens,
            key,
            max_new_tokens=5,
            max_num_batched_tokens=3,
            **filters,
        )
        assert out.lengths.tolist() == [[5], [5], [5]]
        if seed == 0:
            once = CountsTraces.traces
            assert once > 0
    assert CountsTraces.traces == once
