"""Run llama.cpp: one stream in one slot, batches in many.

The slots are a loop over llama.cpp's batch API that does what its server does: prompts in chunks
beside decoding, a slot's place in the cache given to the next request, and what prompts have in
common computed once and copied.
"""

# pyright: reportMissingImports=false
# It runs in an environment of its own, which the type checker does not have.

import os

import llama_cpp
import numpy as np

from peer_runs import names

VOCAB_SIZE = 49152
SLOTS = 32
BATCH = 512  # tokens of one call
FILES = {"f32": names.GGUF_F32, "kvf16": names.GGUF_F32, "q4": names.GGUF_Q4}


def make(name, variant, workload):
    """Load the model."""
    path = os.path.join(os.environ["PEERS_DIR"], FILES[variant])
    # K and V are float32 beside float32 params, and otherwise llama.cpp's default.
    kind = llama_cpp.GGML_TYPE_F32 if variant == "f32" else llama_cpp.GGML_TYPE_F16
    num_slots = min(SLOTS, len(workload.prompts) * workload.n)
    system_info = llama_cpp.llama_print_system_info().decode()
    # With AMX, prompts in q4_1 end in a general protection fault; without its buffers they do not.
    extra_buffers = not (variant == "q4" and "AMX" in system_info)
    facts = {
        "versions": {"llama-cpp-python": llama_cpp.__version__},
        "slots": num_slots,
        "extra_buffers": extra_buffers,
        "system_info": system_info,
    }
    return Slots(path, kind, num_slots, extra_buffers).run, facts


class Slots:
    """Serve requests in so many slots of one context."""

    def __init__(self, path, kind, num_slots, extra_buffers):
        llama_cpp.llama_backend_init()
        of_model = llama_cpp.llama_model_default_params()
        of_model.use_extra_bufts = extra_buffers
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), of_model)
        assert self.model, f"llama.cpp did not load {path}"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 640 * (num_slots + 1)
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = num_slots + 1
        params.n_threads = params.n_threads_batch = len(names.cpus())
        params.kv_unified = True
        params.type_k = params.type_v = kind
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp made no context"
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.num_slots = num_slots  # and one more holds what all prompts have in common
        self.rng = np.random.default_rng(0)

    def run(self, work):
        """Return the tokens of each output."""
        llama_cpp.llama_memory_clear(self.memory, True)
        self.temperature, self.n = work.temperature, work.n
        self.prompts = [prompt for prompt in work.prompts for _ in range(work.n)]
        self.lengths = work.lengths
        self.outputs = [[] for _ in self.prompts]
        self.waiting = list(range(len(self.prompts)))[::-1]
        self.free = list(range(self.num_slots))[::-1]
        self.active = {}  # slot -> [request, tokens in the cache, tokens to compute]
        self.owners = {}  # prompt -> slot that holds all of it
        self.num_shared = self._compute_shared(work)
        while self.waiting or self.active:
            self._admit()
            ended = self._fill()
            assert llama_cpp.llama_decode(self.context, self.batch) == 0
            for index, slot in ended:
                self._take(index, slot)
        return self.outputs

    def _add(self, token, position, slot, wants_logits):
        batch, i = self.batch, self.batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants_logits
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
        batch.n_tokens = i + 1

    def _compute_shared(self, work) -> int:
        """Compute the tokens that all prompts begin with; return how many they are."""
        if work.n > 1 or len(work.prompts) == 1:
            return 0
        first, count = work.prompts[0], 0
        most = min(map(len, work.prompts)) - 1
        while count < most and all(p[count] == first[count] for p in work.prompts):
            count += 1
        for begin in range(0, count, BATCH):
            self.batch.n_tokens = 0
            for position in range(begin, min(begin + BATCH, count)):
                self._add(first[position], position, self.num_slots, False)
            assert llama_cpp.llama_decode(self.context, self.batch) == 0
        return count

    def _admit(self) -> None:
        """Give free slots to waiting requests, with what others have computed for them."""
        while self.waiting and self.free:
            request = self.waiting[-1]
            prompt, is_sibling = self.prompts[request], bool(request % self.n)
            if is_sibling and request // self.n not in self.owners:
                break  # until the first sample of this prompt has computed it
            self.waiting.pop()
            slot, source, count = self.free.pop(), self.num_slots, self.num_shared
            if is_sibling:
                source, count = self.owners[request // self.n], len(prompt) - 1
            if count:
                llama_cpp.llama_memory_seq_cp(self.memory, source, slot, 0, count)
            self.active[slot] = [request, count, list(prompt[count:])]

    def _fill(self) -> list[tuple[int, int]]:
        """Fill the batch, decoding first; return where logits are wanted, and of which slot."""
        self.batch.n_tokens, wanted = 0, []
        for slot, entry in sorted(self.active.items(), key=lambda item: len(item[1][2])):
            room = BATCH - self.batch.n_tokens
            if room == 0:
                break
            part, entry[2] = entry[2][:room], entry[2][room:]
            for i, token in enumerate(part):
                is_last = not entry[2] and i == len(part) - 1
                if is_last:
                    wanted.append((self.batch.n_tokens, slot))
                self._add(token, entry[1] + i, slot, is_last)
            entry[1] += len(part)
        return wanted

    def _take(self, index: int, slot: int) -> None:
        """Choose a slot's next token, and free the slot at the end of its request."""
        pointer = llama_cpp.llama_get_logits_ith(self.context, index)
        logits = np.ctypeslib.as_array(pointer, (VOCAB_SIZE,))
        if self.temperature:
            noise = -np.log(-np.log(self.rng.random(VOCAB_SIZE)))
            logits = logits / self.temperature + noise
        token, entry = int(logits.argmax()), self.active[slot]
        request = entry[0]
        self.outputs[request].append(token)
        prompt = request // self.n
        if self.n > 1:
            self.owners.setdefault(prompt, slot)
        if len(self.outputs[request]) < self.lengths[request]:
            entry[2] = [token]
            return
        del self.active[slot]
        needed = any(other // self.n == prompt for other in self.waiting)
        if self.owners.get(prompt) == slot and needed:
            return  # the slot is kept until its siblings have copied the prompt
        llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
        self.free.append(slot)
