"""Beam search by a full forward pass of every beam at every step, no cache: what the engine's must
agree with, token for token.
"""

import math


def plain_beam_search(log_probs, prompt, params, stop_ids, max_len):
    """Outputs as (tokens, log-probabilities, score, reason), the best first. `log_probs(context)`
    gives one float a token.
    """
    width, prompt_len = params.beam_width, len(prompt)
    live, done = [([], [])], []  # tokens and their log-probabilities
    while True:
        length = len(live[0][0]) + 1
        is_last = prompt_len + length >= max_len
        going, ending = [], []
        for tokens, logprobs in live:
            for token, logprob in enumerate(log_probs(prompt + tokens)):
                beam = ([*tokens, token], [*logprobs, logprob])
                (ending if token in stop_ids else going).append(beam)
        going = sorted(going, key=lambda beam: -math.fsum(beam[1]))[:width]
        worst = math.fsum(going[-1][1]) if len(going) == width else -math.inf
        new = [(beam, "stop") for beam in ending if math.fsum(beam[1]) >= worst]
        new += [(beam, "length") for beam in going if is_last]
        done += [
            (*beam, math.fsum(beam[1]) / length**params.length_penalty, reason)
            for beam, reason in new
        ]
        done = sorted(done, key=lambda output: -output[2])[:width]
        if is_last or not going:
            return done
        if len(done) == width:
            best = math.fsum(going[0][1])
            hoped = best / length**params.length_penalty
            if params.early_stopping == "never":
                hoped = max(hoped, best / (max_len - prompt_len) ** params.length_penalty)
            if params.early_stopping is True or done[-1][2] >= hoped:
                return done
        live = going
