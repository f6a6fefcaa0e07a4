"""What sharing blocks saves: samples and beams of one prompt, and a system prompt of all requests.

    saved       share of the blocks that would be in use without sharing, averaged over steps:
                (table entries of running rows - blocks in use) / table entries
    faster      throughput with sharing / without, from the same pool

1. Memory, without a model: the real scheduler and allocator with logits that are a hash of token
   and position. The better tokens stand out as in a language model (scores are exponential). How
   early beams part depends on them: the real model below is the check.
2. Throughput for real, SmolLM2, greedy text continuations. Without sharing, samples are requests of
   their own; of beams only as many groups run at once as fit without sharing (copies that they
   would need cost nothing, which favours that side).
3. The same prompts with prefix caching on and off.

Usage: python benchmarks/sharing.py [--quick] [--out FILE]
"""

import time
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lengths import ALPACA, SHAREGPT, Mix, draw
from no_pages import NoPages
from paged_jax import BeamSearchParams, Engine, EngineConfig, SamplingParams
from paged_jax.models import load_model
from script import describe_machine, parse, save

WIDTHS, BLOCK_SIZE = (2, 4, 6), 16
PAPER = "paper (SOSP 2023): sharing saves up to 55 % of the memory and gives up to 2.2 times"
TEXT = "The harbour town woke slowly under a grey sky, and the boats came back one after another. "


class HashDecoder(NoPages):
    """Gives logits that are a hash of token and position; keeps no K and V."""

    vocab_size = 512

    def __call__(self, tokens, batch, k_pages, v_pages):
        mixed = tokens.astype(jnp.uint32) * 40503 + batch.positions.astype(jnp.uint32) * 65599
        return mixed[:, None], k_pages, v_pages

    def logits(self, hidden):
        x = hidden + jnp.arange(self.vocab_size, dtype=jnp.uint32) * jnp.uint32(2654435761)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            x = (x ^ (x >> shift)) * jnp.uint32(factor)
        return -1.6 * jnp.log((x >> 8).astype(jnp.float32) / 2**24 + 1e-7)


def params_of(kind: str, width: int, tokens: int, seed: int = 0) -> Any:
    """Return the parameters of `width` samples or beams."""
    if kind == "beams":
        return BeamSearchParams(width, max_tokens=tokens, ignore_eos=True)
    return SamplingParams(n=width, temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)


def drain(engine: Engine, stride: int = 1) -> tuple[float, int, float]:
    """Run to the end. Returns share saved, most blocks in use, and seconds."""
    logical = physical = most = 0
    begin = time.perf_counter()
    while engine.has_unfinished():
        for request_id in engine.run(stride):
            engine.take(request_id)
        pool = engine.state.cache.pool
        used = pool.num_blocks - 1 - int(pool.num_free)
        logical += int(jnp.sum(engine.state.cache.tables.num_blocks))
        physical, most = physical + used, max(most, used)
    return 1 - physical / max(logical, 1), most, time.perf_counter() - begin


# ---------------------------------------------------------------- memory, without a model


def memory_saved(mix: Mix, count: int) -> list[dict]:
    """Print and return what samples and beams save, in a pool that is always large enough."""
    print(f"\n{mix.name}, {count} requests, no model\n{'':10}" + "".join(f"{w:>8}" for w in WIDTHS))
    prompts, outputs = draw(mix, count, seed=1, most=256)
    rows, model = [], HashDecoder(512)
    for kind in ("samples", "beams"):
        places = 8 * WIDTHS[-1]
        config = EngineConfig(
            places * 32 + 1, 512, places, 512, max_beam_width=WIDTHS[-1] if kind == "beams" else 0
        )
        engine = Engine(*nnx.split(model), config)
        shares = []
        for width in WIDTHS:
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                tokens = (np.arange(int(prompt)) * 7 + i) % model.vocab_size
                engine.add_request(tokens.tolist(), params_of(kind, width, int(output), i))
            saved, _, _ = drain(engine)
            shares.append(saved)
            rows.append({"mix": mix.name, "kind": kind, "width": width, "saved": saved})
        print(f"{kind:<10}" + "".join(f"{share:>8.1%}" for share in shares), flush=True)
    return rows


# ---------------------------------------------------------------- throughput, for real


def real_engine(model: tuple[Any, Any], blocks: int, places: int, **options: Any) -> Engine:
    """Return an engine of SmolLM2."""
    config = EngineConfig(blocks + 1, 256, places, 64, num_rows=2 * places, **options)
    graphdef, params = model
    return Engine(graphdef, params, config)


def serve_groups(engine: Engine, prompts: list, kind: str, width: int, new: int, at_once: int):
    """Serve all prompts, `at_once` at most; samples of 1 are requests of their own."""
    waiting = list(enumerate(prompts))
    running: dict[str, int] = {}  # outputs that each has to end
    begin = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < at_once:
            i, prompt = waiting.pop(0)
            running[engine.add_request(prompt, params_of(kind, width, new, i))] = width
        for request_id in engine.run(8):
            updates = engine.take(request_id)
            running[request_id] -= sum(update.finish_reason is not None for update in updates)
            if running[request_id] == 0:
                del running[request_id]
    return time.perf_counter() - begin


def throughput(model: Any, tokens: list[int], groups: int, length: int, new: int) -> list[dict]:
    """Print and return, for samples and beams of each width, seconds with and without sharing."""
    widest, whole = WIDTHS[-1], -(-(length + new - 1) // BLOCK_SIZE)
    prompts = [tokens[i : i + length] for i in range(groups)]
    pool, rows = 2 * widest * whole, []  # two groups of the widest fit without sharing
    print(
        f"\nSmolLM2 for real: {groups} prompts of {length} tokens, {new} new, pool of {pool} blocks"
        "\n                  saved   seconds   without sharing   faster"
    )
    for kind in ("samples", "beams"):
        beam = {"max_beam_width": widest} if kind == "beams" else {}
        engine = real_engine(model, pool, 8 * widest, **beam)
        engine.add_request(tokens[:8], params_of(kind, widest, 2))
        drain(engine)  # compiles
        for width in WIDTHS:
            for i, prompt in enumerate(prompts):
                engine.add_request(prompt, params_of(kind, width, new, i))
            saved, _, seconds = drain(engine)
            if kind == "samples":
                for i, prompt in enumerate(prompts * width):
                    engine.add_request(prompt, params_of(kind, 1, new, i))
                _, _, without = drain(engine)
            else:
                without = serve_groups(engine, prompts, kind, width, new, pool // (width * whole))
            rows.append(
                {"kind": kind, "width": width, "saved": saved, "with": seconds, "without": without}
            )
            print(
                f"{kind:<9}{width:>3} {saved:>10.1%} {seconds:>9.1f} {without:>17.1f} "
                f"{without / seconds:>8.2f}",
                flush=True,
            )
    return rows


def system_prompt(model: Any, tokens: list[int], count: int, shared: int) -> list[dict]:
    """Print and return what prefix caching saves of a shared system prompt, in a limited pool."""
    own, new = 16, 24
    prompts = [tokens[:shared] + tokens[shared + i : shared + i + own] for i in range(count)]
    pool, rows = 4 * -(-(shared + own + new) // BLOCK_SIZE), []
    print(
        f"\nSmolLM2 for real: {count} requests share a system prompt of {shared} tokens, {own} of "
        f"their own, {new} new; pool of {pool} blocks\ncaching   seconds   tokens computed   "
        "running at most   saved"
    )
    for caching in (False, True):
        engine = real_engine(model, pool, 24, enable_prefix_caching=caching)
        engine.add_request(tokens[300:310], params_of("samples", 1, 2))
        drain(engine)  # compiles
        before = engine.counters.computed_tokens  # type: ignore[union-attr]
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, params_of("samples", 1, new, i))
        saved, _, seconds = drain(engine)
        counters: Any = engine.counters
        computed, peak = counters.computed_tokens - before, counters.peak_running
        rows.append(
            {"caching": caching, "seconds": seconds, "computed": int(computed), "saved": saved}
        )
        print(
            f"{'on' if caching else 'off':<7} {seconds:>9.1f} {computed:>17,} {peak:>17} "
            f"{saved:>7.1%}",
            flush=True,
        )
    return rows


def main() -> None:
    """Print the tables."""
    args = parse(__doc__)
    print(describe_machine())
    count = 8 if args.quick else 48
    memory = memory_saved(ALPACA, count) + memory_saved(SHAREGPT, count)
    print(f"\n{PAPER}")
    decoder, tokenizer = load_model("smollm2-135m")
    model = nnx.split(decoder)
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT * 30)
    numbers = {"memory": memory}
    numbers["real"] = throughput(model, tokens, *((4, 20, 16) if args.quick else (12, 40, 48)))
    numbers["system_prompt"] = system_prompt(model, tokens, 8 if args.quick else 24, 192)
    save(args.out, numbers)


if __name__ == "__main__":
    main()
