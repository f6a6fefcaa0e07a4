"""Sampling parameters of a model's generation_config.json."""

from collections.abc import Mapping
from typing import Any

from paged_jax.errors import InvalidRequestError, warn
from paged_jax.sampling.parameters import SamplingParams

# transformers' names of our parameters.
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# What would change the output and is not served, with the value that changes nothing.
UNSUPPORTED = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "max_length": 20,
    "min_length": 0,
    "max_time": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "stop_strings": None,
}


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that the settings give, and the defaults for the others.

    `{"do_sample": false, "top_k": 20} -> SamplingParams(temperature=0, top_k=20)`. As in vLLM, a
    temperature counts where `do_sample` is absent. Warns of what is not supported or not accepted,
    and leaves it out.
    """
    left_out = [
        name
        for name, neutral in UNSUPPORTED.items()
        if settings.get(name, neutral) not in (neutral, None, [], {})
    ]
    if left_out:
        shown = ", ".join(f"{name}={settings[name]!r:.40}" for name in left_out)
        warn(f"generation config: not supported and left out: {shown}")
    values: dict[str, Any] = {}
    for name, ours in NAMES.items():
        if (value := settings.get(name)) is None:
            continue
        try:
            SamplingParams(**values, **{ours: value})
        except InvalidRequestError as error:
            warn(f"generation config: {name} is left out: {error}")
        else:
            values[ours] = value
    if settings.get("do_sample") is False:
        values["temperature"] = 0.0
    return SamplingParams(**values)
