"""vLLM's side of a race: runs in vLLM's own environment, so it imports nothing of tplab.

``python vllm_side.py ANSWERS FOLDER DTYPE LENGTH``: one JSON object per line on standard input, ``{"prompts": [[ids]],
"new_tokens": [counts], "first": bool}``, and one per line to the file descriptor ANSWERS, since vLLM prints to the
others: first ``{"ready": version}``, then ``{"first": seconds, "total": seconds, "tokens": [[ids]]}`` for each line.
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
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        first, _ = _run(vllm, llm, prompts, [1] * len(prompts)) if work["first"] else (0.0, None)
        total, tokens = _run(vllm, llm, prompts, work["new_tokens"])
        print(json.dumps({"first": first, "total": total, "tokens": tokens}), file=say)


def _run(vllm, llm, prompts: list, counts: list) -> tuple:
    params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in counts]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(*sys.argv[1:])
