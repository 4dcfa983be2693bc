"""llama.cpp's side of the benchmark: runs in its own environment, so it imports nothing of tplab.

``python llama_side.py ANSWERS FILE DTYPE TOKENS SEQUENCES THREADS``: one JSON object per line on standard input,
``{"prompts": [[ids]], "new_tokens": [counts]}``, and one per line to the file descriptor ANSWERS: first ``{"ready":
version}``, then ``{"first": seconds, "total": seconds, "tokens": [[ids]]}`` for each line. Room is made for that many
TOKENS in that many SEQUENCES.
"""

import json
import os
import sys
import time
from collections import deque

import numpy as np

BATCH = 512  # tokens of a step, as elsewhere


def main(answers: str, file: str, dtype: str, tokens: str, sequences: str, threads: str) -> None:
    """Load, say so, answer until the input ends."""
    say = os.fdopen(int(answers), "w", buffering=1)
    import llama_cpp

    llama = Llama(llama_cpp, file, dtype, int(tokens), int(sequences), int(threads))
    print(json.dumps({"ready": llama_cpp.__version__}), file=say)
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps(llama.run(work["prompts"], work["new_tokens"])), file=say)


class Llama:
    """A model and a context in which every sequence has room."""

    def __init__(self, api, file: str, dtype: str, tokens: int, sequences: int, threads: int):
        self.api = api
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = tokens, BATCH, BATCH, sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True  # one cache for all: sequences are of unlike lengths
        if dtype == "float32":  # else it keeps keys and values in float16
            params.type_k = params.type_v = api.GGML_TYPE_F32
        self.context = self.model and api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes nothing of {file}")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(BATCH, 0, 1)
        self.words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def run(self, prompts: list[list[int]], counts: list[int]) -> dict:
        """Answer all prompts greedily: each step has the next token of all that decode, and as much of the prompts as
        there is room for."""
        self.api.llama_memory_clear(self.memory, True)
        begin, first = time.perf_counter(), 0.0
        made, waiting, read, decoding = [[] for _ in prompts], deque(range(len(prompts))), [0] * len(prompts), []
        while waiting or decoding:
            step = [(number, len(prompts[number]) + len(made[number]) - 1, made[number][-1], True)
                    for number in decoding]
            while waiting and len(step) < BATCH:
                number = waiting[0]
                prompt, start = prompts[number], read[number]
                stop = read[number] = min(len(prompt), start + BATCH - len(step))
                step += [(number, place, prompt[place], place == len(prompt) - 1) for place in range(start, stop)]
                if stop == len(prompt):
                    waiting.popleft()
                    decoding.append(number)
            for number, token in self.step(step):
                made[number].append(token)
                if len(made[number]) == counts[number]:
                    decoding.remove(number)
                    self.api.llama_memory_seq_rm(self.memory, number, -1, -1)
            if not first and all(made):
                first = time.perf_counter() - begin
        return {"first": first, "total": time.perf_counter() - begin, "tokens": made}

    def step(self, step: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """``(sequence, position, token, whether its logits are wanted)`` → ``(sequence, next token)``."""
        batch = self.batch
        batch.n_tokens = len(step)
        for i, (number, place, token, wanted) in enumerate(step):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode fails on {len(step)} tokens")
        logits = [(number, self.api.llama_get_logits_ith(self.context, i))
                  for i, (number, _, _, wanted) in enumerate(step) if wanted]
        return [(number, int(np.ctypeslib.as_array(row, (self.words,)).argmax())) for number, row in logits]


if __name__ == "__main__":
    main(*sys.argv[1:])
