"""vLLM's side of a race: runs in vLLM's own environment, so it imports nothing of tplab.

``python vllm_side.py ANSWERS FOLDER DTYPE LENGTH``: one JSON object per line on standard input, ``{"prompt": [ids],
"new_tokens": count}``, and one per line to the file descriptor ANSWERS, since vLLM prints to the others: first
``{"ready": version}``, then ``{"first": seconds, "total": seconds, "tokens": [ids]}`` for each line.
"""

import json
import os
import sys
import time


def main(answers: str, folder: str, dtype: str, length: str) -> None:
    """Load, say so, answer until the input ends."""
    say = os.fdopen(int(answers), "w", buffering=1)
    import vllm

    llm = vllm.LLM(folder, dtype=dtype, max_model_len=int(length), max_num_seqs=64, skip_tokenizer_init=True,
                   enable_prefix_caching=False)
    print(json.dumps({"ready": vllm.__version__}), file=say)
    for line in sys.stdin:
        work = json.loads(line)
        first, _ = _run(vllm, llm, work["prompt"], 1)
        total, tokens = _run(vllm, llm, work["prompt"], work["new_tokens"])
        print(json.dumps({"first": first, "total": total, "tokens": tokens}), file=say)


def _run(vllm, llm, prompt: list, count: int) -> tuple:
    params = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - begin, list(output.outputs[0].token_ids)


if __name__ == "__main__":
    main(*sys.argv[1:])
