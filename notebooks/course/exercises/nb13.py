"""Notebook 13: a product beside a sum, a sum as a ring, and a layer of which each rank keeps its own rows."""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course.cost.overlap import SUMMANDS, scattered, sizes_here
from course.judge.exercise import Example, Exercise, Most
from course.judge.toy_checkpoint import toy_model
from course.judge.words import NotYet
from course.judge.work import IDS, numbers, unchanged
from tplab.checks import counted
from tplab.model.trace import point
from tplab.patch import Patch, original
from tplab.ranks import all_gather, all_reduce, op_log, rank, reduce_scatter, world_size  # noqa: F401  (for edits)
from tplab.ranks.context import current

# Hidden numbers, and of how many tokens each rank keeps the rows: first what divides; where it does not, not as chunk
# would deal them out.
ROWS = ((4, (3, 3)), (6, (2, 2, 2)), (5, (2, 3)), (4, (2, 3, 2)), (3, (1, 0)), (6, (4, 0, 3)), (4, (3, 2, 2, 2)))
ALONE = "one rank has all rows, so two to four logical ranks have judged it"
REDUCE = "tplab.shard.linear.RowParallelLinear."


def in_the_engine(setting, answer):
    """An answer in a small model with uneven heads and biases, on as many ranks as it allows, and in the setting's."""
    setting.align(model=toy_model(9, 3, o_bias=True), prompts=IDS)
    setting.align()


def my_overlapped_row_parallel(x, weight, parts):
    sums, works = [], []
    for rows in x.chunk(parts):
        sums.append(rows @ weight.T)
        works.append(all_reduce(sums[-1], async_op=True))
    for work in works:
        work.wait()
    return torch.cat(sums)


def products():
    for tokens, inputs, outputs, parts, size in ((6, 4, 5, 2, 2), (7, 3, 4, 3, 2), (5, 4, 3, 4, 3), (2, 5, 4, 3, 2),
                                                 (6, 4, 5, 1, 2)):
        yield Example(numbers(size, tokens, inputs, seed=1), numbers(size, outputs, inputs, seed=2), parts, ranks=size,
                      says=f"{tokens} tokens in {counted(parts, 'part')} on {size} ranks")


class Products(TorchDispatchMode):
    """Notes at every product of matrices how many sums have been started, and how many of these are complete; and
    whether a tensor is written while its sum is under way."""

    def __enter__(self):
        self.seen, self.overwritten = [], False
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            begin, end = memory(args[0])
            started = [memory(work.tensor) for work in current().started]
            self.overwritten |= any(begin < last and first < end for first, last in started)
        if func.overloadpacket.__name__ in ("mm", "bmm", "mv", "addmm", "linear", "matmul"):
            waiting, done = len(current().started), len(op_log())
            self.seen.append((waiting + done, done))
        return func(*args, **(kwargs or {}))


def memory(t: torch.Tensor) -> tuple[int, int]:
    """The addresses between which its numbers lie."""
    return t.data_ptr(), t.data_ptr() + t.nbytes


def beside(answer, x, weight, parts):
    """A part's sum starts as soon as its product is there, and is not waited for before the next product."""
    with Products() as made:
        returned = answer(x[rank()], weight[rank()], parts)
    yield "a tensor is written while its sum is under way", made.overwritten, False
    yield "it returns", returned
    least, sums = len(x[0].chunk(parts)), op_log()
    count = min(max(least, len(made.seen)), parts)  # where the tokens do not divide, some make fewer parts
    yield "the numbers summed up are", Most(sum(torch.Size(record.shape).numel() for record in sums), 1)
    yield "all sums are started with async_op=True", all(record.started for record in sums), True
    yield "each sum is of whole rows", all(record.shape[1:] == weight.shape[1:2] for record in sums), True
    yield "the number of sums is", len(sums), count
    yield "the number of products is", len(made.seen), count
    for n, (started, done) in enumerate(made.seen[1:], 1):
        yield f"when product {n + 1} of {count} is computed, the sums started are", started, n
        yield f"when product {n + 1} of {count} is computed, sum {n} is under way", done < n, True


def in_parts(answer) -> list[Patch]:
    """The engine's row-parallel products with their sums, by a learner's function, three parts at a time."""
    def partial(self, x):
        self.rows_in = x
        return original(f"{REDUCE}partial")(self, x)

    def reduce(self, partial):
        return answer(self.rows_in, self.weight, 3) + (0 if self.bias is None else self.bias)

    return [Patch(f"{REDUCE}partial", partial), Patch(f"{REDUCE}reduce", reduce)]


def my_reduce_scatter(x, sizes, pass_on):
    rows, at = x.split(sizes), rank() - 1
    summed = rows[at % len(sizes)]
    for step in range(len(sizes) - 1):
        at -= 1
        summed = pass_on(summed) + rows[at % len(sizes)]
    return summed


class Ring:
    """``pass_on`` as a learner's function calls it: to the next rank, from the one before."""

    def __init__(self):
        self.sent = self.calls = 0

    def __call__(self, t):
        if not isinstance(t, torch.Tensor) or not t.dim():
            raise NotYet(f"pass_on takes rows to send, not {type(t).__name__}")
        self.sent, self.calls = self.sent + t.numel(), self.calls + 1
        group, line = current(), sys._getframe(1)  # the learner's, for what is said of ranks that wait
        rows = group.all_gather(torch.tensor([len(t)]), 0, None, line).tolist()
        return group.all_gather(t, 0, rows, line).split(rows)[rank() - 1].clone()


def summands():
    for hidden, sizes in ROWS:
        ten = 10.0 ** torch.arange(len(sizes)).view(-1, 1, 1)  # each digit of a sum is one rank's
        yield Example((ten * torch.arange(1.0, sum(sizes) + 1).view(-1, 1)).expand(-1, -1, hidden).contiguous(),
                      list(sizes), ranks=len(sizes), says=f"sizes {list(sizes)}, and on rank r rows of 1 · 10^r, 2 · "
                                                          "10^r, …")


def passed(answer, x, sizes):
    ring = Ring()
    yield "it returns", answer(x[rank()], sizes, ring)
    yield "the calls of pass_on are", ring.calls
    yield "the numbers sent are", Most(ring.sent, 1), Most((sum(sizes) - sizes[rank()]) * x.shape[2], 1)


def reduced_by(answer) -> list[Patch]:
    """The engine's sums, by a learner's function and an all-gather."""
    def reduce(self, partial):
        sizes = sizes_here(len(partial))
        return all_gather(answer(partial, sizes, Ring()), 0, sizes)

    return [Patch(f"{REDUCE}reduce", reduce)]


def my_sequence_parallel_layer(own, sizes, input_norm, attention, post_norm, mlp):
    own = own + reduce_scatter(attention(all_gather(input_norm(own), 0, sizes)), 0, sizes)
    return own + reduce_scatter(mlp(all_gather(post_norm(own), 0, sizes)), 0, sizes)


def toys():
    for hidden, sizes in ROWS:
        size, tokens = len(sizes), sum(sizes)
        shapes = (tokens, hidden), (2, hidden), (size, hidden, hidden), (size, hidden, hidden), (hidden,)
        yield Example(*(numbers(*shape, seed=n) for n, shape in enumerate(shapes)), list(sizes), ranks=size,
                      says=f"{tokens} tokens, {'/'.join(map(str, sizes))} on the ranks")


def calls(answer, x, norms, mix, up, bias, sizes):
    """What each of the layer's four parts is given, and what comes back; each token sees those before it."""
    r, seen, mine = rank(), [], x.split(sizes)[rank()].clone()

    def part(name, function):
        def call(rows):
            seen.append((name, rows.clone()))
            if name in ("attention", "mlp") and len(rows) != len(x):
                raise NotYet(f"{name} is given {len(rows)} of {len(x)} rows: its heads and columns are this rank's, "
                             "so it needs the rows of all")
            return function(rows)
        return call

    def norm(number):
        return lambda rows: rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norms[number]

    once = bias * (r == 0)
    returned = answer(mine, sizes, part("input_norm", norm(0)),
                      part("attention", lambda rows: torch.tanh(rows.cumsum(0)) @ mix[r] + once),
                      part("post_norm", norm(1)), part("mlp", lambda rows: torch.relu(rows) @ up[r] + once))
    unchanged("own", mine.equal(x.split(sizes)[r]))
    yield "the parts are called in the order", [name for name, _ in seen]
    for name, rows in seen:
        yield f"{name} is given", rows
    yield "it returns", returned
    yield "the collectives are", sorted(record.op for record in op_log())


def layer_of(answer) -> list[Patch]:
    """The engine's layers by a learner's function; joined behind each, as a trace wants them."""
    def forward(self, hidden, cos, sin, context):
        sizes = sizes_here(len(hidden))
        mine = scattered(answer, self, hidden.split(sizes)[rank()], sizes, cos, sin, context)
        out = all_gather(mine, 0, sizes)
        point(f"layers.{self.layer}.output", out)
        return out

    return [*SUMMANDS, Patch("tplab.model.decoder.DecoderLayer.forward", forward)]


def layer_in_the_engine(setting, answer):
    config = setting.checkpoint.config
    if config.experts or config.residual_multiplier != 1 or dict(config.norms).keys() != {
            "input_layernorm", "post_attention_layernorm"}:
        return "in the small examples only: this model's layers have parts that yours has not"
    in_the_engine(setting, answer)


_WAITS = "    for work in works:\n        work.wait()\n"
_ATTENDS = "reduce_scatter(attention(all_gather(input_norm(own), 0, sizes)), 0, sizes)"
_MLP = "reduce_scatter(mlp(all_gather(post_norm(own), 0, sizes)), 0, sizes)"
_WHOLE_SUMS = (f"{_ATTENDS} -> all_reduce(attention(all_gather(input_norm(own), 0, sizes))).split(sizes)[rank()]",
               f"{_MLP} -> all_reduce(mlp(all_gather(post_norm(own), 0, sizes))).split(sizes)[rank()]")
EXERCISES = [
    Exercise("13", my_overlapped_row_parallel, products, {
        "a rank's own summand comes back: is it read, copied or joined before its wait()?":
            f"{_WAITS}    return torch.cat(sums) ->     out = torch.cat(sums)\n{_WAITS}    return out",
        "each sum is waited for before the next product, so nothing is computed while it is under way":
            "async_op=True)) -> async_op=True)); works[-1].wait()",
        "all products are computed before the first sum starts":
            "        works.append(all_reduce(sums[-1], async_op=True))\n ->     works = [all_reduce(one, "
            "async_op=True) for one in sums]\n",
        "parts is not used: x is not cut": "x.chunk(parts) -> [x]",
        "the outputs are cut, and the tokens are to be cut":
            "x.chunk(parts) -> weight.chunk(parts) ;; rows @ weight.T -> x @ rows.T ;; cat(sums) -> cat(sums, -1)",
        "the inputs are cut, and the tokens are to be cut":
            "x.chunk(parts) -> zip(x.chunk(parts, 1), weight.chunk(parts, 1)) ;; "
            "rows @ weight.T -> rows[0] @ rows[1].T ;; torch.cat(sums) -> sum(sums)",
        "the tokens that the division leaves over are in no part":
            "x.chunk(parts) -> x[:len(x) // parts * parts].chunk(parts)",
    }, "while the sum of one part is under way, the next part is computed, and nothing is read before its wait; on "
       "{ranks}, every trace point agrees with Hugging Face", beside, in_parts, in_the_engine, dims="token, output",
             counted=False),
    Exercise("13", my_reduce_scatter, summands, {
        "each rank returns its own summand of its rows: where are the others' added?":
            "range(len(sizes) - 1) -> range(0) ;; rank() - 1 -> rank()",
        "one message too many: after one for each other rank, all summands are in":
            "range(len(sizes) - 1) -> range(len(sizes))",
        "a message is missing: there is one for each other rank":
            tuple(f"range(len(sizes) - 1) -> range({count})" for count in ("len(sizes) - 2", "min(1, len(sizes) - 1)")),
        "the last summand, this rank's own, is missing":
            "summed = pass_on(summed) + rows[at % len(sizes)] -> summed = pass_on(summed) + (step < len(sizes) - 2) * "
            "rows[at % len(sizes)]",
        "pass_on gives what the rank before has sent: which of your rows belong to what arrives?":
            "at -= 1 -> at += 1 ;; rank() - 1 -> rank() + 1",
        "your own rows are added to whatever arrives: which rows are these?":
            "+ rows[at % len(sizes)] -> + rows[rank()]",
        "a collective of the lab has added them up: pass the rows on with pass_on":
            "summed = rows[at % len(sizes)] -> return reduce_scatter(x.clone(), 0, sizes)",
        "rows of two ranks are added: what arrives is kept by the rank before the one whose rows you have just sent":
            "at -= 1 -> pass ;; + rows[at % len(sizes)] -> + rows[(at - step) % len(sizes)]",
        "each rank ends with the sum of another rank's rows: with whose rows must a rank begin?":
            "at = x.split(sizes), rank() - 1 -> at = x.split(sizes), rank()",
        "the sum is right, and rows are sent that the next rank does not need: a message has the rows of one rank":
            "x.split(sizes), rank() - 1 -> [x] * len(sizes), 0 ;; return summed -> return summed.split(sizes)[rank()]",
    }, "every rank returns the sum of its rows, and no row is sent twice; on {ranks}, with an all-gather "
       "behind it, it takes the place of the engine's all_reduce", passed, reduced_by, in_the_engine,
             dims="row, hidden", alone=ALONE),
    Exercise("13", my_sequence_parallel_layer, toys, {
        "the residual of attention is missing": f"own = own + {_ATTENDS} -> own = {_ATTENDS}",
        "the residual of the MLP is missing": f"return own + {_MLP} -> return {_MLP}",
        "a residual is in it once for every rank: is it added before the sum?": (
            f"own + {_ATTENDS} -> {_ATTENDS.replace('attention(', 'all_gather(own, 0, sizes) + attention(')}",
            f"own + {_MLP} -> {_MLP.replace('mlp(', 'all_gather(own, 0, sizes) + mlp(')}"),
        "the MLP is given what attention was given: what goes in after the first residual?":
            "    own = own ->     first = own\n    own = own ;; post_norm(own) -> post_norm(first)",
        "a residual is added to the normed rows: it is added to what went into the norm":
            f"own = own + {_ATTENDS} -> own = input_norm(own); own = own + "
            f"{_ATTENDS.replace('input_norm(own)', 'own')}",
        "the second residual is what came into the layer; attention belongs to it":
            "    own = own ->     first = own\n    own = own ;; return own -> return first",
        "a rank goes on with its own summand of its rows: where are the others' added?":
            (f"{_ATTENDS} -> attention(all_gather(input_norm(own), 0, sizes)).split(sizes)[rank()]",
             f"{_MLP} -> mlp(all_gather(post_norm(own), 0, sizes)).split(sizes)[rank()]"),
        "rows of different tokens are added up: all_reduce adds what each rank has in the same place": (
            f"{_ATTENDS} -> all_reduce(attention(all_gather(input_norm(own), 0, sizes)).split(sizes)[rank()])",
            f"{_MLP} -> all_reduce(mlp(all_gather(post_norm(own), 0, sizes)).split(sizes)[rank()])"),
        "every rank gets the whole sum and throws rows of it away: which collective gives it only its own?":
            (*_WHOLE_SUMS, " ;; ".join(_WHOLE_SUMS)),
        "a norm is given all rows, of which a rank keeps its own: normalise before you gather": (
            "all_gather(input_norm(own), 0, sizes) -> input_norm(all_gather(own, 0, sizes))",
            f"own = own + {_ATTENDS} -> own = all_gather(own, 0, sizes); "
            f"own = own + all_reduce(attention(input_norm(own))) ;; return own + {_MLP} -> "
            "return (own + all_reduce(mlp(post_norm(own)))).split(sizes)[rank()]"),
    }, "norms and residuals see a rank's own rows, attention and MLP all, with four messages; on {ranks}, every "
       "layer of the model agrees with Hugging Face", calls, layer_of, layer_in_the_engine, dims="row, hidden",
             alone=ALONE)]
