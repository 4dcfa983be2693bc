"""Notebook 12: a mixture of experts on the ranks, with one sum."""

import torch
from torch.nn import functional as F

from course.judge.exercise import Example, Exercise, Most
from course.judge.toy_checkpoint import toy_experts
from course.judge.work import IDS, Multiplications, numbers, unchanged
from tplab.model.trace import point
from tplab.patch import Patch
from tplab.ranks import all_reduce, rank, world_size  # noqa: F401  (an edit of a reference may need it)
from tplab.shard import split_evenly

ALONE = "one rank has all of it, so two to four logical ranks have judged it"


def my_moe(x, weights, ids, experts, gate_up, down):
    summand = torch.zeros_like(x)
    for local, expert in enumerate(experts):
        rows, place = torch.where(ids == expert)
        gate, up = (x[rows] @ gate_up[local].T).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ down[local].T
        summand.index_add_(0, rows, out * weights[rows, place, None])
    return all_reduce(summand)


def layers():
    """Whole experts are dealt out, or each is cut; and how the tokens choose. First what halves."""
    for tokens, hidden, columns, experts, top_k, size, whole, how in (
            (6, 12, 8, 8, 2, 2, True, ""), (5, 14, 7, 8, 2, 3, True, "no token for expert 4"),
            (4, 13, 11, 8, 3, 2, False, ""), (3, 12, 5, 8, 2, 3, True, "all tokens to experts 0 to 2"),
            (1, 12, 9, 7, 2, 3, True, ""), (4, 12, 6, 2, 1, 3, True, ""), (6, 8, 8, 4, 2, 2, True, "in bfloat16")):
        x, logits, gate_up, down = (numbers(*shape, seed=tokens + n) for n, shape in enumerate((
            (tokens, hidden), (tokens, experts), (experts, 2 * columns, hidden), (experts, hidden, columns))))
        logits[:, {"no token for expert 4": [4], "all tokens to experts 0 to 2": range(3, 8)}.get(how, [])] = -torch.inf
        weights, ids = logits.softmax(-1).topk(top_k)  # not renormalised: they add up to less than 1
        held = split_evenly(experts, size) if whole else [range(experts)] * size
        cut = [range(columns)] * size if whole else split_evenly(columns, size)
        x, weights, gate_up, down = (t.bfloat16() if "bf" in how else t for t in (x, weights, gate_up, down))
        counts = ", ".join(map(str, map(len, held if whole else cut)))
        yield Example(x, weights, ids, held, cut, gate_up, down, ranks=size, says=(
            f"{tokens} tokens with top_k {top_k}, {how}{', ' * bool(how)}ranks that hold {counts} "
            + ("experts" if whole else f"columns of each of {experts} experts")))


def on_a_rank(answer, x, weights, ids, held, cut, gate_up, down):
    experts, columns = held[rank()], cut[rank()]
    gate, up = (part[experts.start:experts.stop, columns.start:columns.stop] for part in gate_up.chunk(2, dim=1))
    down_here = down[experts.start:experts.stop, :, columns.start:columns.stop].contiguous()
    before = [tensor.clone() for tensor in (x, weights, ids)]
    with Multiplications() as work:
        yield "it returns", answer(x, weights, ids, experts, torch.cat([gate, up], 1), down_here)
    unchanged("x, weights or ids", all(map(torch.equal, before, (x, weights, ids))))
    rows = sum(int((ids == expert).sum()) for expert in experts)
    yield "the numbers multiplied on this rank are", Most(work.count, 1), Most(rows * 3 * x.shape[1] * len(columns), 1)


def block_of(answer) -> list[Patch]:
    """The engine's experts, with a learner's function behind the router."""
    def forward(self, x):
        logits = self.gate(x)
        point(f"layers.{self.layer}.router_logits", logits)
        weights, ids = self.route(logits)
        held, mlps = [int(expert) for expert in self.experts], list(self.experts.values())
        out = answer(x, weights.to(x.dtype), ids, range(held[0], held[-1] + 1), torch.stack(
            [mlp.gate_up_proj.weight for mlp in mlps]), torch.stack([mlp.down_proj.weight for mlp in mlps]))
        point(f"layers.{self.layer}.mlp", out)
        return out

    return [Patch("tplab.model.experts.SparseMoeBlock.forward", forward)]


def in_a_model(setting, answer):
    moe = setting.checkpoint.config.experts
    if moe and (moe.bias or moe.swiglu or moe.shared_intermediate_size):
        return "in the small examples only: this model's experts have parts that yours have not"
    model, prompts = (None, None) if moe else (toy_experts(), IDS)
    for mode in (False, True)[:setting.tensor_parallel_size]:
        setting.align(model=model, prompts=prompts, dtype=setting.narrow, enable_expert_parallel=mode)


_WEIGHED = "summand.index_add_(0, rows, out * weights[rows, place, None])"
EXERCISES = [
    Exercise("12", my_moe, layers, {
        "there are only zeros: which rows go through which expert?": "summand.index_add_ -> x.clone().index_add_",
        "each rank returns its own summand: where are they added up, and is the result of that used?": (
            "return all_reduce(summand) -> return summand",
            "return all_reduce(summand) -> all_reduce(summand.clone()); return summand"),
        "the sum over the ranks is made twice, as in engine C":
            "return all_reduce(summand) -> return all_reduce(all_reduce(summand))",
        "a rank that holds no expert, or none that was chosen, must call all_reduce, too": (
            "return all_reduce(summand) -> return all_reduce(summand) if len(experts) else summand",
            "return all_reduce(summand) -> return all_reduce(summand) if any(e in ids for e in experts) else summand"),
        "ids count the experts of the whole model, not those of this rank: which expert is the first one here?":
            "ids == expert -> ids == local",
        "ranks need not hold equally many experts: the first one here is experts[0]":
            "ids == expert -> ids == local + len(experts) * rank()",
        "no weight is in it: each expert's output is multiplied by its weight": " * weights[rows, place, None] -> ",
        "gate and up are exchanged: which half of gate_up goes through silu?": "gate, up = -> up, gate =",
        "silu is missing: which half of gate_up goes through it?": "F.silu(gate) -> gate",
        "the weight multiplies an expert's output, and here its input: silu is not linear":
            "x[rows] @ -> (x[rows] * weights[rows, place, None]) @ ;; out * weights[rows, place, None] -> out",
        "only each token's first expert is used": "torch.where(ids == -> torch.where(ids[:, :1] ==",
        "gate and up are both put through silu; only gate is": "F.silu(gate) * up -> F.silu(gate) * F.silu(up)",
        "the weights are divided by their sum: take them as they are given":
            "weights[rows, place, None] -> (weights / weights.sum(-1, keepdim=True))[rows, place, None]",
        "the weights of another choice are taken: place says where in ids the expert stands":
            "weights[rows, place, None] -> weights[rows, :1]",
        "rows of tokens that did not choose an expert are computed, too: take only those that did": (
            "(x[rows] @ gate_up[local].T).chunk(2, dim=-1) -> (x @ gate_up[local].T)[rows].chunk(2, dim=-1)",
            "x[rows] -> x ;; (F.silu(gate) * up) @ down[local].T -> ((F.silu(gate) * up) @ down[local].T)[rows]"),
        "where a token has two experts on a rank, the second overwrites the first: add them up":
            f"{_WEIGHED} -> summand[rows] = out * weights[rows, place, None]",
    }, "each token has its experts' sum, with one all_reduce and no row too many; on {ranks}, the model agrees with "
       "Hugging Face, with its experts cut or whole", on_a_rank, block_of, in_a_model, dims="token, hidden",
             alone=ALONE)]
