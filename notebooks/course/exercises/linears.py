"""Notebook 02: column, row, one sum."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course.exercises.rotation import numbers
from course.judge.attempt import Attempt, NotYet, for_each, on_ranks, saying, tensor
from course.judge.compare import agree, first_without, is_like
from course.judge.cuts import span
from course.judge.verdict import Setting, exercise
from tplab.checkpoint.layout import read_part, tensor_parts
from tplab.checks import counted
from tplab.pool import shared_pool
from tplab.shard import split_evenly

# Tokens, hidden and inner features, ranks: what halves, and what does not; no square, into which a wrong cut fits.
SIZES = ((5, 6, 8, 2), (5, 6, 9, 2), (4, 5, 4, 3), (1, 5, 11, 3), (2, 4, 3, 1))
_WAITS = "a sum has a summand from every rank: do all of them ask for it?"


@exercise("my_linears", "02", takes="x, up, down, bias",
          alone="one rank has nothing to cut, so two and three logical ranks have judged it",
          agreed="x upᵀ downᵀ + bias on every rank, each with its own share of the work, and one all_reduce; the "
                 "model's own MLP weights on {ranks}, too")
def linears(attempt: Attempt, setting: Setting):
    """On 2 and 3 logical ranks of five shapes; then with the MLP weights of the model's first layer on the ranks."""
    def check(case):
        tokens, hidden, inner, size = case
        generator = torch.Generator().manual_seed(inner)
        x, up, down, bias = (torch.randn(shape, generator=generator, dtype=(torch.float32, torch.float64)[inner > 8])
                             for shape in ((tokens, hidden), (inner, hidden), (hidden, inner), (hidden,)))
        ran = on_ranks(size, _counted, attempt, x, up, down, bias, waits=_WAITS)
        _judge(ran, x, up, down, bias, f"{counted(tokens, 'token')}, {hidden} → {inner} → {hidden} features, "
               f"{counted(size, 'rank')}: ", attempt.made)

    for_each(SIZES, check, lambda case: f"{case[2]} inner features and {case[3]} ranks")
    size, ckpt = setting.tensor_parallel_size, setting.checkpoint
    parts = tensor_parts(ckpt.config, ckpt.tensors)
    with ckpt.reader() as reader:
        up, down = (read_part(parts[f"model.layers.0.mlp.{one}_proj.weight"], reader).float() for one in ("up", "down"))
    args = numbers(7, up.shape[1]), up, down, numbers(len(down), seed=1)  # few models have a bias
    _judge(on_ranks(shared_pool(size), _counted, attempt, *args, waits=_WAITS), *args,
           f"with the weights of the model, on {counted(size, 'rank')}: ")


def _counted(attempt: Attempt, *args) -> tuple[object, int]:
    """On a rank: what it returns, and how many numbers it has multiplied for that."""
    with Multiplications() as work:
        return attempt(*args), work.count


class Multiplications(TorchDispatchMode):
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


def _judge(ran: list, x, up, down, bias, what: str, made: dict | None = None) -> None:
    """``ran``: of each rank, what it returned and has multiplied, and its collectives; ``made``: by rank, by line."""
    size, true, values = len(ran), x @ up.T @ down.T + bias, []
    for number, ((value, _), _) in enumerate(ran):
        with saying(f"{what}on rank {number} "):
            values.append(tensor(value, "tokens, hidden", true.shape, true.dtype))
    log, found, right = ran[0][1], torch.stack(values), true.expand(size, *true.shape)
    ops = [record.op for record in log]
    early = next((f"your line {record.line} calls {record}: the inner features of the ranks are other ones; what is "
                  f"added up are summands {list(true.shape)}" for record in log
                  if record.shape == (len(x), -(-len(up) // size)) != true.shape), "")
    with saying(what):
        cuts = split_evenly(len(up), size), [range(r, len(up), size) for r in range(size)]
        cut, is_cut_so = next(((cut, True) for cut in cuts if made and all(any(
            is_like(one, x @ up[[*part]].T, 1e-3) for _, one in made.get(r, ())) for r, part in enumerate(cut))),
            (cuts[0], False))
        inner = [x @ up[[*part]].T for part in cut]
        summands = [own @ down[:, [*part]].T for own, part in zip(inner, cut)]
        at = first_without(made or {}, summands)
        own, first = torch.stack(summands), torch.eye(size)[0].view(size, 1, 1)
        alone = (own, own + bias, own + bias * first, own + bias / size) if size > 1 else ()
        agree(found, right, {
            "each rank returns its own summand. " + ("The log shows an all_reduce: is its result used?" if ops else
                                                     "Where are they added up?"): alone}, early,
              within=1e-4 if true.dtype == torch.float32 else 1e-9, dims="rank, token", made=(made or {}).get(at, ()),
              steps={f"rank {at}'s {span(cut[at], 'inner features')}": inner[at],
                  "their product with the same columns of down": summands[at]} if is_cut_so else None, parts={
                  **{f"inner feature {n}": torch.outer(x @ up[n], down[:, n]) for n in range(len(up))},
                  "the bias": bias, "x itself": x} if made else None)
        if (reduces := ops.count("all_reduce")) != 1 or len(ops) > 1:
            log = ", ".join(f"{ops.count(op)} × {op}" for op in dict.fromkeys(ops)) or "no collective"
            raise NotYet(f"the result is right, and the op log holds {log}. " + (
                "Has every rank computed everything?" if not ops else "One sum is enough, over the summands of "
                f"[tokens, hidden]{': what is needed of the other ranks before it?' if reduces < 2 else ''}"))
        share = max(map(len, split_evenly(len(up), size))) * (x.numel() + true.numel())
        most = max(multiplied for (_, multiplied), _ in ran)
        if most > 1.3 * share:  # a last rank that takes all of the rest has done its share, too
            raise NotYet(f"the result is right, and a rank multiplies {most:,} times where its share is {share:,}: " + (
                "cut the weights before you multiply, not the result" if most >= len(up) * x.numel() + share // 2 else
                "which rank has less?"))
