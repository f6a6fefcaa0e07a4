"""26 prompts through SmolLM2-135M in one `generate`, in a pool too small for all of them at once.

Shows the answers, then what paging did: the blocks that were used, and how few sequences would have
run if each had been given room for max_model_len tokens beforehand.
"""

import time

START = time.perf_counter()

from paged_jax import LLM, SamplingParams  # noqa: E402

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, MAX_RUNNING = 16, 72, 512, 40
# As many tokens a step as sequences: one width serves decoding and prefill, and half as much is
# compiled as with two. It suits short prompts; long ones want a larger budget (LLM's default).
TOKENS_A_STEP = MAX_RUNNING

QUESTIONS = [
    ("What is the capital of France?", 32),
    ("Write a haiku about the sea.", 48),
    ("Explain in one sentence what a hash table is.", 64),
    ("List three primary colours.", 32),
    ("Why is the sky blue?", 96),
    ("Translate 'good morning' into Spanish.", 24),
    ("Give me a recipe for pancakes.", 128),
    ("What is 12 times 12?", 32),
    ("Who wrote Romeo and Juliet?", 32),
    ("Describe a rainy day in the city.", 96),
    ("What is the boiling point of water?", 40),
    ("Name two animals that can fly.", 32),
    ("Write a short story about a lost key.", 160),
    ("How do plants make food?", 96),
    ("What does a compiler do?", 80),
    ("Suggest a name for a black cat.", 24),
    ("Give three tips for sleeping well.", 112),
    ("What is the largest planet?", 32),
    (
        "Summarise what a library is, and why a town might want one, for a child of six who has "
        "never been to one.",
        96,
    ),
    ("Tell me a joke about computers.", 64),
]
BEGINNINGS = [
    ("Once upon a time, in a village at the edge of the forest,", 96),
    ("The three laws of motion are", 80),
    ("def fibonacci(n):", 64),
    ("Dear Sir or Madam,", 64),
    ("The history of the bicycle begins", 80),
    ("In the year 2050,", 48),
]


def main():
    llm = LLM(
        "smollm2-135m",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_RUNNING,
        max_num_batched_tokens=TOKENS_A_STEP,
        widths=(TOKENS_A_STEP,),
        enable_prefix_caching=False,  # the first token comes some seconds sooner: less to compile
    )
    print(f"model loaded and engine compiled after {time.perf_counter() - START:.1f} s\n")
    assert llm.tokenizer is not None
    chats = [
        llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        for question, _ in QUESTIONS
    ]
    prompts = [llm.tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    prompts += [llm.tokenizer.encode(text) for text, _ in BEGINNINGS]
    asked = [text for text, _ in QUESTIONS + BEGINNINGS]
    params = [
        SamplingParams(temperature=0, max_tokens=limit) for _, limit in QUESTIONS + BEGINNINGS
    ]

    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin

    for question, output in zip(asked, outputs, strict=True):
        print(f"\n> {question}\n{output.outputs[0].text}  [{output.outputs[0].finish_reason}]")

    times = [output.metrics.first_token_time for output in outputs if output.metrics is not None]
    first = min(time for time in times if time is not None)
    stats = llm.stats()
    reserved = MAX_MODEL_LEN // BLOCK_SIZE
    contiguous = (NUM_BLOCKS - 1) // reserved
    whole = contiguous * reserved
    tokens, running = int(stats["generated_tokens"]), stats["peak_running"]
    blocks, waste = stats["peak_blocks"], 100 * stats["waste"]
    reserved_waste = 100 * (1 - mean_length(outputs) / MAX_MODEL_LEN)
    print(f"""
                                        paged    contiguous reservation of {MAX_MODEL_LEN} tokens
  sequences running at peak        {running:>10}    {contiguous:>10}
  blocks of {BLOCK_SIZE} tokens at peak        {blocks:>10}    {whole:>10}   of {NUM_BLOCKS - 1}
  ... that {running} sequences would need            {running * reserved:>10}
  waste (allocated, not filled)    {waste:>8.1f} %    {reserved_waste:>8.1f} %
  preemptions                      {stats["preemptions"]:>10}

  {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s
  first token after {first - START:.1f} s, all after {time.perf_counter() - START:.1f} s""")


def mean_length(outputs):
    """Tokens that a sequence fills of its reservation, on average over its life."""
    lengths = [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) / 2 for o in outputs]
    return sum(lengths) / len(lengths)


if __name__ == "__main__":
    main()
