"""Run transformers: `generate` on padded batches (`hf`), or continuous batching (`hf-cb`)."""

# pyright: reportMissingImports=false
# It runs in an environment of its own, which the type checker does not have.

import os

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

BATCH = 8
PAD = 2
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def make(name, variant, workload):
    """Load the model."""
    torch.manual_seed(0)
    path = os.path.join(os.environ["PEERS_DIR"], "smollm2-hf")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[variant], attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # so that it goes on after the end of text
    model.config.eos_token_id = None
    facts = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
    }
    run = run_continuous if name == "hf-cb" else run_padded
    return lambda work: run(model, work), facts


def run_padded(model, work) -> list[list[int]]:
    """Generate batch by batch; each goes on until its longest output is done."""
    outputs = []
    for begin in range(0, len(work.prompts), BATCH):
        prompts = work.prompts[begin : begin + BATCH]
        limits = work.max_new[begin : begin + BATCH]
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        pairs = list(zip(padding, prompts, strict=True))
        ids = torch.tensor([[PAD] * pad + prompt for pad, prompt in pairs])
        mask = torch.tensor([[0] * pad + [1] * len(prompt) for pad, prompt in pairs])
        with torch.inference_mode():
            rows = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(limits),
                num_return_sequences=work.n,
                pad_token_id=PAD,
                **sampling(work),
            )
        wanted = [limit for limit in limits for _ in range(work.n)]
        new = rows[:, width:].tolist()
        outputs += [row[:limit] for row, limit in zip(new, wanted, strict=True)]
    return outputs


def sampling(work) -> dict:
    """Return the arguments of `generate` that say how tokens are chosen."""
    if work.temperature:
        return {"do_sample": True, "temperature": work.temperature, "top_k": 0, "top_p": 1.0}
    return {"do_sample": False}


def run_continuous(model, work) -> list[list[int]]:
    """Give all requests to a manager of continuous batching, and take them as they end."""
    from transformers.generation import ContinuousBatchingConfig

    settings = GenerationConfig(
        eos_token_id=-1, pad_token_id=PAD, max_new_tokens=max(work.max_new), **sampling(work)
    )
    if work.n > 1:
        settings.num_return_sequences = work.n
    batching = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=1536,
        max_batch_tokens=512,
        use_cuda_graph=False,
        allow_block_sharing=True,
        seed=0,
    )
    found: list[list[list[int]]] = [[] for _ in work.prompts]
    with model.continuous_batching_context_manager(
        generation_config=settings,
        continuous_batching_config=batching,
        block=True,
        timeout=5,
        warmup=False,
    ) as manager:
        indices = {}
        for i, (prompt, limit) in enumerate(zip(work.prompts, work.max_new, strict=True)):
            indices[manager.add_request(input_ids=prompt, max_new_tokens=limit)] = i
        num_left = len(work.prompts) * work.n
        while num_left:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the manager of continuous batching stopped")
                continue
            if getattr(result, "error", None):
                raise RuntimeError(result.error)
            if result.is_finished():
                parent = result.request_id.split("__child#")[0]
                found[indices[parent]].append(list(result.generated_tokens))
                num_left -= 1
    return [tokens for outputs in found for tokens in outputs]
