"""Every trait against Hugging Face: ``python tests/helpers/trait_sweep.py [NAME …]`` prints a table.

A row is a model on so many ranks: how far its logits are in float32 and in float64 (in brackets: of the bound in
:mod:`tplab.align.floors`), how far the log probabilities along the decode path in float64 (chunks, pages, a prefix
cache, preemptions), and how many of its greedy texts are Hugging Face's in float32, token for token.

Where two experts' scores for a token are as near as rounding, which of them is chosen is rounding, too: both engines
are right, and their outputs have nothing in common. Such tokens, and those after them, are counted and left out.
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from tplab.align.floors import RELATIVE, bound
from tplab.align.reference import hf_greedy, hf_model
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.llm import LLM, SamplingParams
from tplab.model import NoCache, load_model
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

NEW, SMALL = 8, dict(block_size=4, num_blocks=19, max_num_batched_tokens=11, max_model_len=64, strict=True)
DTYPES = torch.float32, torch.float64


class Row(NamedTuple):
    """What a model came to; distances as shares of their bounds, absolute ones beside them."""

    tp: int
    experts: str  # "cut", "dealt out", or "" without experts
    far: dict[torch.dtype, float]
    share: dict[torch.dtype, float]
    decode: float
    decode_share: float
    equal: int
    tokens: int
    undecided: int

    @property
    def ok(self) -> bool:
        return max(*self.share.values(), self.decode_share) <= 1 and self.equal == self.tokens

    def __str__(self) -> str:
        cells = [f"{self.far[dtype]:8.1e} ({self.share[dtype]:5.1%})" for dtype in DTYPES]
        left = f", {self.undecided} undecided" * bool(self.undecided) + "   NOT EQUAL" * (not self.ok)
        cells.append(f"{self.decode:8.1e} ({self.decode_share:5.1%})")
        return (f"{self.tp:>2} {self.experts:9} {'  '.join(cells)}  {self.equal}/{self.tokens}{left}")


def some_prompts(vocab: int) -> list[list[int]]:
    """Of different lengths; the last begins as the third does."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in (17, 1, 30)]
    return [*prompts, prompts[2][:24] + [3, 1, 4]]


def hf_logits(ckpt: Checkpoint, dtype: torch.dtype, texts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits of each text by itself."""
    model = hf_model(ckpt, dtype)
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in texts]


def undecided(ckpt: Checkpoint, texts: list[list[int]]) -> list[torch.Tensor]:
    """For each text, which tokens' experts rounding may choose, or those of a token before."""
    found, model, moe = [], hf_model(ckpt, torch.float64), ckpt.config.experts
    if moe is None:
        return [torch.zeros(len(text), dtype=torch.bool) for text in texts]
    routers = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    for text in texts:
        near = torch.zeros(len(text), dtype=torch.bool)

        def hook(module, args, output, near=near):
            logits = output[0].view(len(near), -1)
            best = logits.sort(descending=True).values
            if moe.top_k < moe.num_experts:
                near |= best[:, moe.top_k - 1] - best[:, moe.top_k] <= RELATIVE[torch.float32] * logits.abs().max()
        hooks = [router.register_forward_hook(hook) for router in routers]
        with torch.inference_mode():
            model(input_ids=torch.tensor([text]), use_cache=False)
        for one in hooks:
            one.remove()
        found.append(near.cummax(0).values)
    return found


def our_logits(ckpt: Checkpoint, plan: ShardPlan, dtype: torch.dtype, texts: list[list[int]]) -> torch.Tensor:
    """On every rank: all logits of one forward pass over all texts."""
    lengths = [len(text) for text in texts]
    with torch.inference_mode():
        model = load_model(ckpt, plan, dtype)
        hidden = model(torch.tensor([token for text in texts for token in text]),
                       torch.cat([torch.arange(length) for length in lengths]), NoCache(lengths))
        return model.lm_head.gather(model.compute_logits(hidden))


def generated(ckpt: Checkpoint, tp: int, dtype: str, prompts: list[list[int]], **options):
    """Greedy outputs of an engine that must read in chunks, preempt, and find a prefix in its cache."""
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    with LLM(ckpt, tp, dtype, **SMALL, **options) as llm:
        llm.generate([prompts[2]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        steps = llm.scheduler.history
        assert sum(len(step.preempted) for step in steps), "nothing was preempted"
        assert any(output.metrics.prefix_hit_tokens for output in outputs), "nothing was found in the prefix cache"
    return [output.outputs[0] for output in outputs]


def measure(ckpt: Checkpoint, tp: int, enable_expert_parallel: bool = False, **options) -> Row:
    """One row; ``options`` are further ones of ``LLM``, such as a pool."""
    prompts, far, share = some_prompts(ckpt.config.vocab_size), {}, {}
    plan = ShardPlan.from_config(ckpt.config, tp, enable_expert_parallel=enable_expert_parallel)
    left_out = undecided(ckpt, prompts)
    for dtype in DTYPES:
        right = torch.cat(hf_logits(ckpt, dtype, prompts))
        each = logical_ranks(tp, our_logits, ckpt, plan, dtype, prompts)
        assert all(torch.equal(own, each[0]) for own in each), "ranks have other logits"
        far[dtype] = (each[0] - right)[~torch.cat(left_out)].abs().max().item()
        share[dtype] = far[dtype] / bound("logits", right.abs().max().item(), dtype)
        assert right.abs().max() > 0.5, "logits this small would hide a bug"
    options = {"logical": True} | options | ({"enable_expert_parallel": True} if enable_expert_parallel else {})
    expected = [hf_greedy(ckpt, prompt, NEW) for prompt in prompts]
    exact = generated(ckpt, tp, "float64", prompts, **options)
    texts = [prompt + out.token_ids for prompt, out in zip(prompts, exact)]
    decode = decode_share = 0.0
    judged = undecided(ckpt, texts)
    for prompt, out, logits, skip in zip(prompts, exact, hf_logits(ckpt, torch.float64, texts), judged):
        right = logits[len(prompt) - 1:-1].log_softmax(-1)
        for row, token in enumerate(out.token_ids):
            if not skip[len(prompt) + row - 1]:
                gap = abs(out.logprobs[row][token].logprob - right[row, token].item())
                decode = max(decode, gap)
                decode_share = max(decode_share, gap / bound("logits", logits.abs().max().item(), torch.float64, True))
    certain = [not skip[:-1].any() for skip in judged]
    equal = sum(out.token_ids == theirs for out, theirs, sure in zip(exact, expected, certain) if sure)
    return Row(tp, "" if ckpt.config.experts is None else "dealt out" if enable_expert_parallel else "cut", far, share,
               decode, decode_share, equal, sum(certain), sum(int(skip.sum()) for skip in judged))


def main(names: list[str]) -> int:
    from helpers.trait_models import TRAITS, make_model
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"tp {'experts':9} {'float32':>8} {'':9} {'float64':>8} {'':9} {'decoding':>8} {'':9} equal texts")
    all_ok = True
    for name in names or TRAITS:
        with tempfile.TemporaryDirectory() as folder:
            ckpt = open_checkpoint(make_model(Path(folder) / "m", **TRAITS[name]))
            print(f"{name}: {', '.join(ckpt.config.traits)}")
            for dealt_out in [False, True][:1 + (ckpt.config.experts is not None)]:
                for tp in range(1, 5):
                    row = measure(ckpt, tp, dealt_out)
                    all_ok = all_ok and row.ok
                    print(row, flush=True)
    return 0 if all_ok else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main(sys.argv[1:]))
