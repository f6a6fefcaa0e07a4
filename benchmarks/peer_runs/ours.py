"""Run paged-jax through its public `LLM`.

`ours` has its sizes set by hand for a batch or for one stream; `ours-default` is `LLM(model)`.
Compiling is done in the warm-up, so it is part of the time to load; that of more widths, in another
process, is waited for.
"""

import os

import jax
import jax.monitoring

from paged_jax import LLM, SamplingParams

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
COMPILED = "/jax/core/compile/backend_compile_duration"


def sizes(name, workload) -> dict:
    """Return the sizes that are given to `LLM`."""
    if name == "ours-default":
        return {}
    if len(workload.prompts) * workload.n == 1:
        return {"max_num_seqs": 1}
    return {"max_num_seqs": 64, "max_num_batched_tokens": 512, "enable_prefix_caching": True}


def make(name, variant, workload):
    """Load the model and count what is compiled."""
    compiled = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(count)
    llm = LLM("smollm2-135m", dtype=DTYPES[variant], **sizes(name, workload))

    def run(work):
        params = [
            SamplingParams(
                n=work.n, temperature=work.temperature, max_tokens=count, ignore_eos=True
            )
            for count in work.max_new
        ]
        results = llm.generate(work.prompts, params, progress=False)
        return [output.token_ids for result in results for output in result.outputs]

    def after_warm_up() -> None:
        # The warm-up's tokens are in no workload; nothing of it stays in any case.
        assert llm.reset_prefix_cache()
        facts["no_ladder"] = llm.engine.finish_compiling()
        compiled.clear()

    facts = {
        "versions": {"jax": jax.__version__},
        "device": jax.devices()[0].device_kind,
        "sizes": sizes(name, workload),
        "compilation_cache": bool(os.environ.get("JAX_COMPILATION_CACHE_DIR")),
        "after_warm_up": after_warm_up,
        "after_run": lambda: {"compiled_in_run": len(compiled), "hit_rate": hit_rate(llm)},
    }
    return run, facts


def hit_rate(llm) -> float:
    """Return the share of prompt tokens found in the cache so far."""
    return round(llm.stats()["hit_rate"], 3)
