"""What the host does for a request, by how many there are: add, abort, serve, take. us a request.

python benchmarks/many_requests.py
"""

import argparse
import time
from itertools import pairwise
from typing import Any

from flax import nnx

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.models import Llama
from paged_jax.models.llama_config import LlamaConfig

COUNTS = (1000, 10_000)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    sizes: dict[str, Any] = dict(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2
    )
    model = Llama(LlamaConfig(**sizes, num_kv_heads=1, max_model_len=32), rngs=nnx.Rngs(0))
    config = EngineConfig(1024, 32, 256, 512, num_rows=512, block_size=4)
    engine = Engine(*nnx.split(model), config)
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request([1], params)
    engine.run(32)
    print(f"{'requests':>10} {'add':>8} {'abort':>8} {'serve':>8} {'take':>8}")
    for count in COUNTS:
        times = [time.perf_counter()]

        def mark():
            times.append(time.perf_counter())  # noqa: B023

        ids = [engine.add_request([1], params) for _ in range(count)]
        mark()
        for request_id in ids[::2]:
            engine.abort(request_id)
        mark()
        while engine.has_unfinished():
            engine.run(32)
        mark()
        for request_id in ids:
            engine.take(request_id)
        mark()
        spent = [(b - a) * 1e6 / count for a, b in pairwise(times)]
        spent[1] *= 2  # half of them were aborted
        print(f"{count:>10} " + " ".join(f"{each:8.1f}" for each in spent))


if __name__ == "__main__":
    main()
