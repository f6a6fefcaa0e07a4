"""Time vLLM's own Python scheduler alone, in vLLM's environment: no model is run.

So many requests decode; `schedule()` and `update_from_output()` of each step are timed, and making
the output of a model that there is not, one token a request, is not. The prompts have 64 to 79
tokens, so that about one in 16 requests takes a new block in each step. Garbage collection is
frozen after the warm-up, as vLLM's engine does it.

Usage: python -m peer_runs.vllm_scheduler ROWS CACHING STEPS BLOCKS

Prints "RESULT {...}" with the median of a step in us.
"""

# pyright: reportMissingImports=false
# It runs in an environment of its own, which the type checker does not have.

import gc
import json
import os
import statistics
import sys
import time

import torch
import vllm
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE, MAX_LEN, BUDGET, WARM_UP = 16, 8192, 32768, 32


def make_scheduler(rows: int, caching: bool, blocks: int) -> Scheduler:
    """Return a scheduler of so many blocks, with no requests."""
    model = os.path.join(os.environ["PEERS_DIR"], "smollm2-hf")
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=MAX_LEN, seed=0),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=BUDGET,
            max_model_len=MAX_LEN,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=False,
    )


def add_requests(scheduler: Scheduler, rows: int, steps: int) -> None:
    """Queue the requests; each lasts longer than the steps that are timed."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for i in range(rows):
        prompt = [17 + (i * 7919 + j * 31) % 49000 for j in range(64 + i % 16)]
        params = SamplingParams(temperature=0.0, max_tokens=steps + 2 * WARM_UP, ignore_eos=True)
        scheduler.add_request(
            Request(
                request_id=str(i),
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                arrival_time=float(i),
                block_hasher=hasher,
            )
        )


def step(scheduler: Scheduler, number: int) -> tuple[float, int]:
    """Return the seconds of a step's bookkeeping, and how many tokens it scheduled."""
    begin = time.perf_counter()
    plan = scheduler.schedule()
    seconds = time.perf_counter() - begin
    ids = list(plan.num_scheduled_tokens)
    tokens = [
        []
        if scheduler.requests[request].is_prefill_chunk
        else [17 + (number * 101 + i * 13) % 49000]
        for i, request in enumerate(ids)
    ]
    output = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request: i for i, request in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    begin = time.perf_counter()
    scheduler.update_from_output(plan, output)
    return seconds + time.perf_counter() - begin, plan.total_num_scheduled_tokens


def main() -> None:
    rows, caching, steps, blocks = map(int, sys.argv[1:5])
    scheduler = make_scheduler(rows, bool(caching), blocks)
    add_requests(scheduler, rows, steps)
    number = 0
    while scheduler.waiting or any(
        request.is_prefill_chunk or request.num_output_tokens == 0 for request in scheduler.running
    ):
        step(scheduler, number)
        number += 1
    for _ in range(WARM_UP):
        step(scheduler, number)
        number += 1
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        seconds, tokens = step(scheduler, number)
        number += 1
        times.append(seconds)
        assert tokens == rows == len(scheduler.running)
    row = {"us": statistics.median(times) * 1e6, "vllm": vllm.__version__}
    print("RESULT " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
