"""What an unknown keyword is answered with: the options there are, and what replaces this one."""

import difflib
import functools
import inspect
from typing import Any

from paged_jax.errors import UnknownOptionError

_SAMPLING = "a field of SamplingParams; a keyword of `generate`"
_WIDTH = "beam_width of BeamSearchParams, given in place of SamplingParams"
_BEAMS = "of BeamSearchParams, given in place of SamplingParams"
_NONE = "there is none"

# Names that users of vLLM and transformers know.
REPLACEMENTS = {
    # sizes of an engine
    "max_model_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "num_gpu_blocks_override": "num_blocks",
    "gpu_memory_utilization": "num_blocks; None takes what memory allows",
    "kv_cache_memory_bytes": "num_blocks; None takes what memory allows",
    "swap_space": f"{_NONE}: preempted requests are computed again",
    "cpu_offload_gb": _NONE,
    "preemption_mode": f"{_NONE}: preempted requests are computed again",
    "enable_chunked_prefill": f"{_NONE}: prompts are always computed in chunks",
    "enforce_eager": f"{_NONE}: a step is always one compiled program",
    "tensor_parallel_size": "params sharded over a mesh",
    "pipeline_parallel_size": _NONE,
    "data_parallel_size": "`jax.shard_map` around `generate`",
    "speculative_config": _NONE,
    "enable_lora": _NONE,
    "disable_log_stats": f"{_NONE}: `LLM.stats()` returns counts",
    # models
    "quantization": f"{_NONE}: the checkpoint says it",
    "kv_cache_dtype": f"{_NONE}: pages have the model's dtype",
    "trust_remote_code": f"{_NONE}: nothing is downloaded",
    "revision": f"{_NONE}: nothing is downloaded",
    "download_dir": f"{_NONE}: nothing is downloaded",
    "tokenizer_mode": _NONE,
    # how a request is sampled
    "max_tokens": "max_tokens of SamplingParams, max_new_tokens of `generate`",
    "max_new_tokens": "max_tokens of SamplingParams, max_new_tokens of `generate`",
    "max_length": "max_tokens of SamplingParams, max_new_tokens of `generate`",
    "min_new_tokens": "min_tokens of SamplingParams",
    "n": "n of SamplingParams, num_samples of `generate`",
    "num_samples": "n of SamplingParams, num_samples of `generate`",
    "num_return_sequences": "n of SamplingParams, num_samples of `generate`",
    "best_of": f"{_NONE}: take n outputs and choose by cumulative_logprob",
    "do_sample": "temperature: 0 is greedy",
    "temperature": _SAMPLING,
    "top_k": _SAMPLING,
    "top_p": _SAMPLING,
    "min_p": _SAMPLING,
    "seed": "seed of SamplingParams and LLM, key of `generate`",
    "use_beam_search": _WIDTH,
    "num_beams": _WIDTH,
    "beam_width": _WIDTH,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "presence_penalty": _NONE,
    "frequency_penalty": _NONE,
    "repetition_penalty": _NONE,
    "logit_bias": _NONE,
    "logits_processors": _NONE,
    "bad_words": _NONE,
    "allowed_token_ids": _NONE,
    "guided_decoding": _NONE,
    "structured_outputs": _NONE,
    "stop": "stop_token_ids of SamplingParams, stop_ids of `generate`: token ids, not strings",
    "stop_token_ids": "stop_token_ids of SamplingParams, stop_ids of `generate`",
    "stop_ids": "stop_token_ids of SamplingParams, stop_ids of `generate`",
    "eos_token_id": "stop_token_ids of SamplingParams, eos_ids of `generate`",
    "pad_token_id": f"{_NONE}: `generate` pads its output with 0",
    "ignore_eos": "ignore_eos of SamplingParams; eos_ids left out of `generate`",
    "logprobs": f"{_NONE}: outputs always have the log-probabilities of their tokens",
    "prompt_logprobs": _NONE,
    "use_tqdm": "progress",
    "add_generation_prompt": f"{_NONE}: it is always added",
    "lora_request": _NONE,
    "priority": f"{_NONE}: first come, first served",
    "detokenize": f"{_NONE}: an LLM with a tokenizer returns text",
    "skip_special_tokens": _NONE,
    "include_stop_str_in_output": f"{_NONE}: a stop token stays in the output",
}


def answers_unknown_options[T](target: T) -> T:
    """Let a function, or the `__init__` of a class, answer an unknown keyword by name.

    The signature stays as it is, for `help` and for type checkers.
    """
    called: Any = target.__init__ if isinstance(target, type) else target
    accepted = [
        name
        for name, parameter in inspect.signature(called).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != "self"
    ]
    owner = getattr(target, "__qualname__", "")

    @functools.wraps(called)
    def call(*args, **kwargs):
        for name in kwargs:
            if name not in accepted:
                raise UnknownOptionError(_describe(owner, name, accepted))
        return called(*args, **kwargs)

    if isinstance(target, type):
        target.__init__ = call  # type: ignore[misc]
        return target
    return call  # type: ignore[return-value]


def _describe(owner: str, name: str, accepted: list[str]) -> str:
    """Say that `owner` has no such option, what replaces it, and which it has."""
    close = difflib.get_close_matches(name, accepted, 1)
    if name in REPLACEMENTS:
        advice = f" (here: {REPLACEMENTS[name]})"
    else:
        advice = f" (perhaps {close[0]})" if close else ""
    return f"{name}: {owner} has no such option{advice}; accepted are {', '.join(accepted)}"
