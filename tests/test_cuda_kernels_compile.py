"""The attention kernels and the writes of pages, compiled to machine code without a GPU.

What is checked: no register spills, shared memory suffices, no page array is copied.

For an H200 there is every combination of head_dim, page size, query heads to a KV head and dtype
that the two kernels cover. For an A100 and a B200 the same Triton kernel is compiled by other code
for other limits: there is every pair of head_dim and dtype, and the rest in turn. Decode tiles and
wide ones alternate, and so do the options.
"""

import itertools
import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from compiled import cuda, ptx
from compiled.checks import attention_kernels, whole_array_ops
from compiled.program import read
from paged_jax.kernels import ragged_paged_attention, write_kv

LACKING = cuda.missing_wheels()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=LACKING)]

NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES = (8, 16, 32, 64)
GROUPS = (1, 4, 8)
DTYPES = ("bfloat16", "float16", "float32", "float8", "narrow")
# Dtype of q, dtype of the pages, scales.
FLOAT8 = [("bfloat16", "float8_e4m3fn", "token"), ("bfloat16", "float8_e5m2", "tensor")]
NARROW = [
    ("float16", "float8_e4m3fn", "tensor"),
    ("float16", "int8", "tensor"),
    ("bfloat16", "int8", "token"),
    ("float32", "int8", "token"),
    ("float32", "float8_e4m3fn", "token"),
    ("float32", "bfloat16", None),
    ("bfloat16", "float8_e4m3fn", None),
]
OPTIONS = [dict(), dict(window=100), dict(soft_cap=30.0, return_lse=True)]
SEQS, WIDTH, BLOCKS, KV_HEADS = 8, 64, 1009, 2

spec = jax.ShapeDtypeStruct
ints = partial(spec, dtype=jnp.int32)
INDEX = ints((SEQS,)), ints((SEQS, WIDTH)), ints((SEQS + 1,)), ints(())


def _arguments(
    number: int, head_dim: int, page: int, group: int, dtype: str, num_tokens: int | None = None
):
    """Return (q, pages, pages, scales, scales), and options, of combination `number` of a list."""
    kinds = {"float8": FLOAT8, "narrow": NARROW}.get(dtype, [(dtype, dtype, None)])
    q_dtype, kv_dtype, scaled = kinds[number % len(kinds)]
    num_tokens = num_tokens or (SEQS, 64)[(number + number // 4) % 2]
    q = spec((num_tokens, KV_HEADS * group, head_dim), q_dtype)
    pages = spec((BLOCKS, page, KV_HEADS, head_dim), kv_dtype)
    scale = {
        None: None,
        "token": spec(pages.shape[:3], jnp.float32),
        "tensor": spec((), jnp.float32),
    }[scaled]
    return (q, pages, pages, scale, scale), OPTIONS[number % 3] | dict(sinks=number % 5 == 0)


def _attend(arrays, index, *, sinks, **options):
    q, k_pages, v_pages, k_scale, v_scale = arrays
    sinks = jnp.arange(q.shape[1], dtype=jnp.float32) if sinks else None
    return ragged_paged_attention(
        q, k_pages, v_pages, *index, k_scale=k_scale, v_scale=v_scale, sinks=sinks, **options
    )


def _attend_to_each(arrays, index, *, options, implementation):
    """Call the kernel for each, one after another: merged, the small kernels around them spill."""
    results = []
    for a, o in zip(arrays, options, strict=True):
        result = _attend(a, index, implementation=implementation, **o)
        index, result = jax.lax.optimization_barrier((index, result))
        results.append(result)
    return results


def _compile_calls(device: str, implementation: str, made, xla_options):
    arrays, options = zip(*made, strict=True)
    program = partial(_attend_to_each, options=options, implementation=implementation)
    return cuda.compile_for(device, program, arrays, INDEX, options=xla_options)


def _compile(device: str, implementation: str, combinations, options):
    """Compile one program with a kernel for each combination.

    Where that fails, each is compiled alone, and the first that fails is in the message.
    """
    made = [_arguments(number, *c) for number, c in enumerate(combinations)]
    try:
        return _compile_calls(device, implementation, made, options)
    except Exception:
        for combination, one in zip(combinations, made, strict=True):
            try:
                _compile_calls(device, implementation, [one], options)
            except Exception as error:
                what = f"{implementation} for {device}, {combination}, {one}"
                pytest.fail(f"{what}: {type(error).__name__}: {error}")
        raise


def _check(device, implementation, combinations, record_property, options=NO_SPILLS):
    start = time.monotonic()
    program = read(_compile(device, implementation, combinations, options).as_text())
    kernels = attention_kernels(list(program.computations.values()))
    # Beside the kernel of single rows one of tiles, where there are more tokens than sequences.
    tokens = [_arguments(number, *c)[0][0].shape[0] for number, c in enumerate(combinations)]
    assert len(kernels) == sum(1 + (n > SEQS) for n in tokens)
    seconds = time.monotonic() - start
    text = f"{device}, {implementation}: {len(kernels)} kernels in {seconds:.0f} s, no spills"
    record_property("measured", f"{text} ({combinations[0]} to {combinations[-1]})")
    return len(kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_combination_of_triton_compiles_for_an_h200(head_dim, dtype, record_property):
    combinations = [
        (head_dim, page, group, dtype) for page, group in itertools.product(PAGES, GROUPS)
    ]
    _check("h200", "triton", combinations, record_property)


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_compiles_for_odd_heads_and_pages(dtype, record_property):
    combinations = [
        (7, 1, 3, dtype),
        (64, 24, 16, dtype),
        (128, 5, 64, dtype),
        (160, 100, 5, dtype),
    ]
    _check("h200", "triton", combinations, record_property)


@pytest.mark.parametrize("device", ["a100", "b200"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_compiles_for_other_devices(device, dtype, record_property):
    shift = DTYPES.index(dtype)
    combinations = [
        (head_dim, PAGES[(i + shift) % 4], GROUPS[(i + shift) % 3], dtype)
        for i, head_dim in enumerate(HEAD_DIMS)
    ]
    _check(device, "triton", combinations, record_property)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_combination_of_mosaic_compiles_for_an_h200(
    head_dim, dtype, record_property, monkeypatch, capfd
):
    # Mosaic calls ptxas itself, so XLA's option does not reach it, but it prints what it says. It
    # raises where a kernel takes more shared memory than there is. (What XLA makes of twelve
    # kernels' small operations together may spill.)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    combinations = [
        (head_dim, page, group, dtype) for page, group in itertools.product(PAGES, GROUPS)
    ]
    count = _check("h200", "mosaic_gpu", combinations, record_property, options=None)
    said = "".join(capfd.readouterr())
    spills, registers = (
        [int(n) for n in re.findall(pattern, said)]
        for pattern in (r"(\d+) bytes spill stores", r"Used (\d+) registers")
    )
    assert len(spills) == count and not any(spills)
    record_property("measured", f"... up to {max(registers)} registers")


def _loops_of_mosaic(head_dim: int, num_tokens: int, window, monkeypatch, tmp_path):
    """Return the loops of the kernel with most code: of several rows, where there are any."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    arrays, _ = _arguments(0, head_dim, 16, 4, "bfloat16", num_tokens)
    # Of a scale of its own: what was compiled before is not compiled again.
    made = [(arrays, dict(sinks=False, window=window, scale=0.375 + num_tokens / 1024))]
    _compile_calls("h200", "mosaic_gpu", made, None)
    texts = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert len(texts) == 1 + (num_tokens > SEQS)
    return ptx.loops(max(texts, key=len))


@pytest.mark.parametrize(
    "head_dim, num_tokens, window",
    [(64, SEQS, None), (128, SEQS, None), (128, SEQS, 100), (128, 64, None)],
)
def test_mosaic_loads_apart_and_masks_only_the_edges_of_a_context(
    head_dim, num_tokens, window, record_property, monkeypatch, tmp_path
):
    loops = _loops_of_mosaic(head_dim, num_tokens, window, monkeypatch, tmp_path)
    # The loop over units has the others in it.
    products = [loop for loop in loops if ptx.count(loop)["wgmma"]]
    fewest = min(ptx.count(loop)["wgmma"] for loop in products)
    inner = [loop for loop in products if ptx.count(loop)["wgmma"] == fewest]
    whole = min(inner, key=lambda loop: ptx.count(loop)["setp"])
    counts = ptx.count(whole)
    shown = {name: counts[name] for name in ("wgmma", "ex2", "bar", "cp", "setp", "selp")}
    record_property("measured", f"h200, head_dim {head_dim}, window {window}: {shown}")
    # The loop over whole chunks compares nothing but its counter.
    assert counts["setp"] == 1 and counts["selp"] == 0
    assert counts["bar"] <= 3 and counts["cp"] == 0
    assert max(ptx.count(loop)["setp"] for loop in inner) > 32
    # While the scores of the next chunk are multiplied, the softmax of this one is computed.
    after = [name for name in whole if name.startswith(("wgmma.commit", "ex2", "wgmma.wait"))]
    assert after[0].startswith("wgmma.commit") and after[35].startswith("wgmma.wait")
    # The producer waits for nothing but a free place, and for no product.
    loads = [loop for loop in loops if ptx.count(loop)["cp"] and not ptx.count(loop)["wgmma"]]
    assert any(ptx.count(loop)["cp"] == 8 and ptx.count(loop)["setp"] <= 2 for loop in loads)


@pytest.mark.parametrize(
    "implementation, dtype",
    [("triton", "bfloat16"), ("triton", "int8"), ("mosaic_gpu", "bfloat16")],
)
def test_a_pool_of_more_than_2_32_bytes_compiles(implementation, dtype):
    blocks = 2**32 // (16 * 2 * 64) + 1
    q, pages = spec((SEQS, 8, 64), jnp.bfloat16), spec((blocks, 16, 2, 64), dtype)
    call = partial(_attend, implementation=implementation, sinks=False)
    cuda.compile_for("h200", call, (q, pages, pages, None, None), INDEX, options=NO_SPILLS)


LAYERS = 2


@pytest.mark.parametrize("head_dim, kernel", [(128, "mosaic_gpu"), (80, "triton")])
@pytest.mark.parametrize("num_tokens", [SEQS, 64])
def test_layers_write_in_place_and_attend_without_a_copy_of_a_page(head_dim, kernel, num_tokens):
    """XLA's scatter is in place on CUDA with the pages donated, also inside a loop.

    So no kernel for writing is needed.
    """
    (q, pages, *_), _ = _arguments(0, head_dim, 16, 4, "bfloat16", num_tokens)
    new = spec((num_tokens, KV_HEADS, head_dim), jnp.bfloat16)

    def steps(pages, q, new, slots, index, count):
        def step(_, carry):
            pages, q = carry
            written = []
            for k_pages, v_pages in pages:
                k_pages, v_pages = write_kv(k_pages, v_pages, new, new, slots)
                q = ragged_paged_attention(q, k_pages, v_pages, *index)
                written.append((k_pages, v_pages))
            return tuple(written), q

        return jax.lax.fori_loop(0, count, step, (pages, q))

    arguments = ((pages, pages),) * LAYERS, q, new, ints((num_tokens,)), INDEX, ints(())
    compiled = cuda.compile_for("h200", steps, *arguments, donate_argnums=0)
    text = compiled.as_text()
    program = read(text)
    kernels = attention_kernels(list(program.computations.values()))
    assert len(kernels) == LAYERS * (1 + (num_tokens > SEQS))
    assert kernel in text
    assert [
        line for _, line in whole_array_ops(program, program.in_loops(), lambda s: BLOCKS in s.dims)
    ] == []
    assert [
        line for _, line in whole_array_ops(program, [program.entry], lambda s: BLOCKS in s.dims)
    ] == []
    page_bytes = pages.size * 2
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * LAYERS * page_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < page_bytes


@pytest.mark.parametrize("head_dim", [128, 80])
def test_it_compiles_inside_shard_map_over_kv_heads(head_dim):
    (q, pages, *_), _ = _arguments(0, head_dim, 16, 4, "bfloat16")
    heads, pages_cut, index_cut = P(None, "x"), P(None, None, "x"), (P(),) * len(INDEX)
    compiled = cuda.compile_sharded(
        *("h200", KV_HEADS, lambda q, k, v, index: ragged_paged_attention(q, k, v, *index)),
        *((heads, pages_cut, pages_cut, index_cut), heads, q, pages, pages, INDEX),
    )
    program = read(compiled.as_text())
    instructions = [i for c in program.computations.values() for i in c.instructions]
    assert len(attention_kernels(list(program.computations.values()))) == 1
    assert not [
        i.opcode
        for i in instructions
        if i.opcode.startswith(("all-", "collective", "reduce-scatter"))
    ]
