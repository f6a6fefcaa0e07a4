"""`generate` inside a user's own `jax.jit`: sample several answers a prompt and keep the likeliest,
in one program.

An RL step looks like this: new params come in, samples and their log-probabilities go out, and no
host is asked in between.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax import generate
from paged_jax.models import load_model

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "My favourite season is",
    "Two plus two is",
]
NEW_TOKENS, SAMPLES = 12, 4


def main():
    model, tokenizer = load_model("smollm2-135m")
    assert tokenizer is not None
    graphdef, params = nnx.split(model)  # once
    encoded = [tokenizer.encode(prompt) for prompt in PROMPTS]
    lengths = np.array([len(tokens) for tokens in encoded])
    prompts = np.zeros((len(encoded), 16), np.int32)
    for row, tokens in enumerate(encoded):
        prompts[row, : len(tokens)] = tokens

    traces = 0

    @jax.jit
    def best_of(params, prompts, lengths, key, temperature):
        nonlocal traces
        traces += 1  # runs when the function is traced, not when it is called
        out = generate(
            graphdef,
            params,
            prompts,
            lengths,
            key,
            max_new_tokens=NEW_TOKENS,
            num_samples=SAMPLES,
            temperature=temperature,
            top_p=0.95,
            eos_ids=model.eos_token_ids,
            max_num_seqs=8,  # 16 samples, 8 at a time: the others wait inside the program
        )
        score = out.logprobs.sum(-1) / out.lengths
        best = jnp.argmax(score, axis=1)
        pick = lambda x: jnp.take_along_axis(x, best.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]  # noqa: E731
        return pick(out.tokens), pick(out.lengths), pick(score), out.stats

    for seed, temperature in ((0, 0.7), (1, 1.0)):
        key = jax.random.key(seed)
        tokens, counts, scores, stats = jax.device_get(
            best_of(params, prompts, lengths, key, temperature)
        )
        print(f"\nbest of {SAMPLES} at temperature {temperature}")
        for prompt, row, count, score in zip(PROMPTS, tokens, counts, scores, strict=True):
            print(f"  {score:6.2f}  {prompt}|{tokenizer.decode(row[:count].tolist())!r}")
        print(
            f"  {stats.steps} steps, {stats.generated_tokens} tokens, "
            f"{stats.peak_running} running at peak"
        )
    print(f"\nthe program was traced {traces} time(s)")


if __name__ == "__main__":
    main()
