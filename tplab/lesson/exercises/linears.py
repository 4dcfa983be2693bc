"""Notebook 02: column, row, one sum."""

import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tplab.checkpoint import open_checkpoint
from tplab.checkpoint.layout import read_part, tensor_parts
from tplab.lesson.mine import Mine, NotYet, for_each, on_ranks, ranks_in_words, tensor
from tplab.lesson.verdict import Setting, exercise
from tplab.pool import shared_pool
from tplab.shard import split_evenly

# Tokens, hidden and inner features, ranks: first what halves, then what does not. Where hidden and inner are the same,
# a wrong cut fits; where they differ, it need not.
SIZES = ((3, 8, 8, 2), (5, 6, 8, 2), (5, 6, 9, 2), (4, 4, 7, 3), (6, 5, 11, 3))
_WAITS = "a sum has a summand from every rank: do all of them ask for it?"


@exercise("my_linears", "02", takes="x, up, down, bias",
          agreed="x upᵀ downᵀ + bias on every rank, each with its own share of the work, and one all_reduce; the "
                 "model's own MLP weights on {ranks}, too")
def linears(mine: Mine, setting: Setting):
    """On 2 and 3 logical ranks of five shapes; then with the MLP weights of the model's first layer on the ranks."""
    def check(case):
        tokens, hidden, inner, size = case
        generator = torch.Generator().manual_seed(inner)
        x, up, down, bias = (torch.randn(shape, generator=generator) for shape in (
            (tokens, hidden), (inner, hidden), (hidden, inner), (hidden,)))
        ran = on_ranks(size, _counted, mine, x, up, down, bias, waits=_WAITS)
        _judge(ran, x, up, down, bias, f"{tokens} tokens, {hidden} → {inner} → {hidden} features, {size} ranks: ")

    for_each(SIZES, check, lambda case: f"{case[3]} ranks")
    size = setting.tensor_parallel_size
    x, up, down, bias = _from_the_model(setting.model)
    _judge(on_ranks(shared_pool(size), _counted, mine, x, up, down, bias, waits=_WAITS), x, up, down, bias,
           f"with the weights of the model, on {size} rank{'s' * (size > 1)}: ")
    return "one rank has nothing to cut, so two and three logical ranks have judged it" if size == 1 else None


def _from_the_model(model) -> tuple[torch.Tensor, ...]:
    """An MLP's two matrices from the checkpoint, some input, and a bias, which few models have."""
    checkpoint = open_checkpoint(model) if isinstance(model, str) else model
    parts = tensor_parts(checkpoint.config, checkpoint.tensors)
    with checkpoint.reader() as reader:
        up, down = (read_part(parts[f"model.layers.0.mlp.{name}_proj.weight"], reader).float()
                    for name in ("up", "down"))
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, up.shape[1], generator=generator), up, down, torch.randn(len(down), generator=generator)


def _counted(mine: Mine, *args) -> tuple[object, int]:
    """On a rank: what it returns, and how many numbers it has multiplied for that."""
    with _Multiplications() as work:
        return mine(*args), work.count


class _Multiplications(TorchDispatchMode):
    """Counts multiplications by matrices."""

    _INPUT = {"mm": 0, "bmm": 0, "mv": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, at = func(*args, **(kwargs or {})), self._INPUT.get(func.overloadpacket.__name__)
        if at is not None:
            self.count += result.numel() * args[at].shape[-1]
        return result


def _judge(ran: list, x, up, down, bias, what: str) -> None:
    """``ran``: of each rank, what it returned and has multiplied, and its collectives."""
    size, shape, true = len(ran), [len(x), len(down)], x @ up.T @ down.T + bias
    values = []
    for number, ((value, _), _) in enumerate(ran):
        try:
            values.append(tensor(value, "tokens, hidden", shape, true.dtype))
        except NotYet as wrong:
            raise NotYet(f"{what}on rank {number} {wrong}") from None
    ops = [record.op for record in ran[0][1]]
    wrong = [number for number, value in enumerate(values) if not _close(value, true)]
    if wrong:
        raise NotYet(what + _named(values, wrong, ops, x, up, down, bias))
    if (reduces := ops.count("all_reduce")) != 1 or len(ops) > 1:
        log = ", ".join(f"{ops.count(op)} × {op}" for op in dict.fromkeys(ops)) or "no collective"
        raise NotYet(f"{what}the result is right, and the op log holds {log}. " + (
            "Has every rank computed everything?" if not ops else "One sum is enough, over the summands of "
            f"[tokens, hidden]{': what is needed of the other ranks before it?' if reduces < 2 else ''}"))
    share = max(map(len, split_evenly(len(up), size))) * (x.numel() + true.numel())
    most = max(multiplied for (_, multiplied), _ in ran)
    if most > 1.3 * share:  # a last rank that takes all of the rest has done its share, too
        raise NotYet(f"{what}the result is right, and a rank multiplies {most:,} times where its share is {share:,}: "
                     "cut the weights before you multiply, not the result")


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def _named(values, wrong, ops, x, up, down, bias) -> str:
    """What is wrong, where two shares of this kind of mistake give these very numbers."""
    size, hidden, inner = len(values), len(down), len(up)
    if any(value.isnan().any() for value in values):
        return "there is NaN in it, though nothing that goes in has one"
    parts, whole = split_evenly(inner, size), x @ up.T @ down.T
    summands = [x @ up[part.start:part.stop].T @ down[:, part.start:part.stop].T for part in parts]

    def all_are(*guesses):
        return any(_close(values[0], guess) for guess in guesses) and all(_close(v, values[0]) for v in values)

    for added in ([bias] * size, [bias] + [0] * (size - 1), [0] * size, [bias / size] * size):
        if all(_close(value, own + more) for value, own, more in zip(values, summands, added)):
            return "each rank returns its own summand. " + (
                "The log shows an all_reduce: who keeps its result?" if "all_reduce" in ops else
                "Who adds them up?")
    if size > 1 and all_are(whole + size * bias):
        return f"the bias is in it {size} times, once for each rank: does it belong to the summands or to the sum?"
    if all_are(whole):
        return "the bias is missing"
    if all_are(whole / size, whole / size + bias, (whole + bias) / size):
        return f"the summands are averaged: this is the sum divided by {size}"
    if all_are(size * (whole + bias), size * whole + bias):
        return f"this is {size} times the result: is something added up that was whole already?"
    floor = inner // size * size
    short = x @ up[:floor].T @ down[:, :floor].T
    if floor < inner and all_are(short + bias):  # its bias is right: the sizes before this one divide
        lost = f"{floor}" if inner - floor == 1 else f"{floor}–{inner - 1}"
        return (f"the {inner} inner features do not divide by {size}, and feature{'s' * (inner - floor > 1)} {lost} "
                "went lost: who takes the rest?")
    if hidden == inner:
        for w, u in itertools.product((up, up.T), (down, down.T)):
            guess = x @ w.T @ u.T
            if (w is not up or u is not down) and all_are(guess, guess + bias, guess + size * bias):
                names = " and ".join(name for name, cut, own in (("up", w, up), ("down", u, down)) if cut is not own)
                turned = f"{names} is cut along the other dimension and turned until it fits"
                if " and " in names:
                    turned = f"{names} are cut along the other dimension and turned until they fit"
                return f"this is what comes out when {turned}: outputs are rows (dim 0), inputs are columns (dim 1)"
    first = size * summands[0]
    if size > 1 and all_are(first, first + bias, first + size * bias):
        return "every rank has used the first share of the weights"
    if len(wrong) < size:
        return (f"right on {ranks_in_words([r for r in range(size) if r not in wrong], size)}, wrong on "
                f"{ranks_in_words(wrong, size)}: the sum belongs on every rank")
    if len(sums := [record for record in ops if record == "all_reduce"]) > 1:
        return (f"wrong on every rank, with {len(sums)} sums. Each rank's part of up makes other inner features, which "
                "are no summands of one number: what is summed up first?")
    gap = max((value - whole - bias).abs().max().item() for value in values)
    return (f"wrong on every rank, by up to {gap:.1g} where the numbers go up to {whole.abs().max().item():.1g}. Which "
            "rows of up, and which columns of down, does a rank need?")
