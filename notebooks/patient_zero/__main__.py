"""torchrun --nproc-per-node 2 -m patient_zero FOLDER PROMPT"""

import sys

import torch.distributed as dist
from transformers import AutoTokenizer

from patient_zero.model import load

if __name__ == "__main__":
    folder, prompt = sys.argv[1:]
    dist.init_process_group("gloo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, input_ids = load(folder), tokenizer(prompt).input_ids
    report, new_ids = model.self_test(input_ids), model.generate(input_ids, 24)
    if dist.get_rank() == 0:
        print(report, tokenizer.decode(new_ids), sep="\n")
    dist.destroy_process_group()
