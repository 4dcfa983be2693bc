"""Notebook 13: a sum of which each rank keeps some rows, and a layer whose norms and residuals are a rank's own."""

import sys
from collections.abc import Callable

import torch

from course.judge.attempt import Attempt, NotYet, Uncopied, for_each, on_ranks, saying, tensor, with_its_own
from course.judge.compare import agree, made_of, related, where
from course.judge.toy_checkpoint import toy_model
from course.judge.verdict import Setting, exercise
from tplab.checks import counted
from tplab.model.trace import point
from tplab.patch import Patch
from tplab.ranks import all_gather, rank, reduce_scatter, world_size
from tplab.ranks.context import current
from tplab.shard import split_evenly

# Hidden numbers, and of how many tokens each rank keeps the rows: first what divides; where it does not, not as chunk
# would deal them out.
ROWS = ((4, (3, 3)), (6, (2, 2, 2)), (5, (2, 3)), (4, (2, 3, 2)), (3, (1, 0)), (6, (4, 0, 3)), (4, (3, 2, 2, 2)))
_IDS = [3, 1, 4, 15, 9, 26, 5, 35, 8, 9, 7]  # eleven tokens for a small random model
_CUT = ("each rank cuts its rows out before they are added up, and a sum adds up what stands at the same place: there, "
        "each rank has other tokens")
_WAITS = "Every rank makes the same calls, as often as all: also a rank that keeps no row"
# In a layer, nothing is summed up, and no point is passed: its rows are not those of Hugging Face.
SUMMANDS = [Patch("tplab.shard.linear.RowParallelLinear.reduce", lambda self, partial: partial),
            *(Patch(f"tplab.model.{name}.point", lambda name, tensor: None) for name in ("attention", "mlp"))]


class Ring(Uncopied):
    """``pass_on`` as a learner's function calls it: to the next rank, from the one before. ``sent``: of each message
    how many numbers it had."""

    def __init__(self):
        self.sent = []

    def __call__(self, t):
        if not isinstance(t, torch.Tensor) or not t.dim():
            raise NotYet(f"pass_on takes rows to send, not {type(t).__name__}")
        self.sent.append(t.numel())
        group, line = current(), sys._getframe(1)  # the learner's, for what is said of ranks that wait
        rows = group.all_gather(torch.tensor([len(t)]), 0, None, line).tolist()
        return group.all_gather(t, 0, rows, line).split(rows)[rank() - 1].clone()


def sizes_here(tokens: int) -> list[int]:
    """How many of so many tokens each rank keeps."""
    return [len(part) for part in split_evenly(tokens, world_size())]


def _reduced_by(answer: Callable) -> list[Patch]:
    """The engine's sums, by a learner's function and an all-gather."""
    def reduce(self, partial):
        sizes = sizes_here(len(partial))
        return all_gather(answer(partial, sizes, Ring()), 0, sizes)

    return [Patch("tplab.shard.linear.RowParallelLinear.reduce", reduce)]


def in_the_engine(setting: Setting) -> None:
    """An answer in a small model with uneven heads and biases, on as many ranks as it allows, and in the setting's."""
    toy = toy_model(9, 3, o_bias=True)
    with saying(f"9 query and 3 KV heads, {len(_IDS)} tokens, "):
        Setting(toy, _IDS, setting.tensor_parallel_size, patches=setting.patches).align()
    setting.align()


@exercise("my_reduce_scatter", "13", takes="x, sizes, pass_on", patches=_reduced_by,
          alone="one rank has no other to pass rows to, so two to four logical ranks have judged it",
          agreed="every rank keeps the sum of its rows, and no number travels that need not; on {ranks}, with an "
                 "all-gather behind it, it takes the place of the engine's all_reduce")
def my_reduce_scatter(attempt: Attempt, setting: Setting):
    """Rows that divide by the ranks and that do not, ranks that keep none, bfloat16; then every sum of the engine."""
    def check(case, dtype=torch.float32):
        hidden, sizes = case
        tokens, size = sum(sizes), len(sizes)
        x = torch.randn(size, tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        with saying(f"{counted(tokens, 'token')}, of which the ranks keep {'/'.join(map(str, sizes))}: "):
            _judge_ring(on_ranks(size, _passed, attempt, x, list(sizes), waits=_WAITS), x, sizes)

    for_each(ROWS, check, lambda case: "2 ranks, where each row travels once," if len(case[1]) == 2 else
             f"{len(case[1])} ranks")
    check(ROWS[3], torch.bfloat16)
    in_the_engine(setting)


def _passed(attempt: Attempt, x: torch.Tensor, sizes: list[int]) -> tuple[object, list[int]]:
    ring = Ring()
    return attempt(x[rank()], sizes, ring), ring.sent


def _judge_ring(ran: list, x: torch.Tensor, sizes) -> None:
    size, values = len(sizes), []
    for number, ((value, _), _) in enumerate(ran):
        with saying(f"on rank {number} "):
            values.append(tensor(value, "rows kept, hidden", (sizes[number], x.shape[2]), x.dtype))

    parts = [one.float().split(sizes) for one in x]

    def kept(of: Callable) -> torch.Tensor:
        """What all ranks return if each returns ``of(rank)``; nothing if these are not as many rows as it keeps."""
        some = [of(number) for number in range(size)]
        return torch.cat(some) if all(len(one) == n for one, n in zip(some, sizes)) else torch.empty(0)

    def whole(at):
        return sum(part[at % size] for part in parts)

    right, found, parted = kept(whole), torch.cat(values).float(), {}
    if len(set(sizes)) == 1:  # then rows of another rank can stand where a rank's own belong
        right, found = (one.view(size, sizes[0], -1) for one in (right, found))
        parted = {f"rank {r}'s summand of rank {of}'s rows": parts[r][of] for of in range(size) for r in range(size)}
    agree(found, right, {says: tuple(one.view_as(right) for one in (way if isinstance(way, tuple) else (way,))
                                     if one.numel() == right.numel()) for says, way in {
        "each rank returns its own summand of its rows: where are the others' added?": kept(lambda r: parts[r][r]),
        "each rank ends with the sum of the next rank's rows: with whose rows must a rank begin?":
            kept(lambda r: whole(r + 1)),
        "each rank ends with the sum of the rows of the rank before it: with whose rows must a rank begin?":
            kept(lambda r: whole(r - 1)),
        "a rank returns what came in, without its own summand of these rows":
            kept(lambda r: whole(r) - parts[r][r]),
        "what comes in is passed on as it is: where is a rank's own added?": tuple(
            kept(lambda r, off=off: parts[(r + off) % size][r]) for off in range(1, size)),
        f"a rank's own summand is in it twice: after {size - 1} message{'s' * (size > 2)} all have added theirs": (
            kept(lambda r: whole(r) + parts[r][r]),
            kept(lambda r: whole(r - 1) + parts[r][r - 1])),
        **({_CUT: torch.cat([sum(parts[r][r] for r in range(size))] * size),
            "the number of the rank that keeps the rows gets larger with each message: rows come from the rank before, "
            "so it gets smaller": tuple(kept(lambda r, off=off: sum(
                parts[(r - j) % size][(r + off - 2 * j) % size] for j in range(size))) for off in range(size))}
           if len(set(sizes)) == 1 else {}),
        f"the sum is divided by {size}": right / size,
        f"the sum is in it {size} times": right * size}.items()},
        dims="rank, row" if parted else "row", parts=parted or {
            f"rank {r}'s summand": x[r].float() for r in range(size)},
        within=3e-2 if x.dtype == torch.bfloat16 else 1e-4)
    for number, ((_, sent), log) in enumerate(ran):
        if len(log) > 2 * len(sent):  # pass_on has two for each message
            raise NotYet(f"the sum is right, and rank {number} calls {', '.join({record.op for record in log})}: "
                         "pass_on is enough, once for each other rank's rows")
        most = (sum(sizes) - sizes[number]) * x.shape[2]
        if sum(sent) > most:
            raise NotYet(f"the sum is right, and rank {number} sends {sum(sent)} numbers where {most} are enough: the "
                         "rows of each other rank, once")


def scattered(answer: Callable, layer, own, sizes, cos, sin, context) -> torch.Tensor:
    """A layer of the engine's by a learner's function, with :data:`SUMMANDS` in force."""
    return answer(own, sizes, layer.input_layernorm, lambda x: layer.self_attn(x, cos, sin, context),
                  layer.post_attention_layernorm, layer.mlp)


def _layer_of(answer: Callable) -> list[Patch]:
    """The engine's layers by a learner's function; joined behind each, as a trace wants them."""
    def forward(self, hidden, cos, sin, context):
        sizes = sizes_here(len(hidden))
        own = scattered(answer, self, hidden.split(sizes)[rank()], sizes, cos, sin, context)
        out = all_gather(own, 0, sizes)
        point(f"layers.{self.layer}.output", out)
        return out

    return [*SUMMANDS, Patch("tplab.model.decoder.DecoderLayer.forward", forward)]


def sequence_parallel_layer(own, sizes, input_norm, attention, post_norm, mlp):
    """What the exercise asks for."""
    own = own + reduce_scatter(attention(all_gather(input_norm(own), 0, sizes)), 0, sizes)
    return own + reduce_scatter(mlp(all_gather(post_norm(own), 0, sizes)), 0, sizes)


@exercise("my_sequence_parallel_layer", "13", takes="own, sizes, input_norm, attention, post_norm, mlp",
          patches=_layer_of, right=sequence_parallel_layer,
          alone="one rank has all rows, so two to four logical ranks have judged it",
          agreed="norms and residuals see a rank's own rows, attention and MLP all, with four messages; on {ranks}, "
                 "every layer of the model agrees with Hugging Face")
def my_sequence_parallel_layer(attempt: Attempt, setting: Setting):
    """A small layer that mixes tokens, rows that divide and that do not; then all layers of the engine."""
    def check(case, dtype=torch.float32):
        hidden, sizes = case
        toy = _Toy(hidden, sizes, dtype)
        with saying(f"{counted(sum(sizes), 'token')}, {'/'.join(map(str, sizes))} on the ranks: "):
            toy.judge(on_ranks(len(sizes), with_its_own, toy.called, [attempt] * len(sizes), waits=_WAITS))

    for_each(ROWS, check, lambda case: f"{len(case[1])} ranks")
    check(ROWS[3], torch.bfloat16)
    config = setting.checkpoint.config
    if config.experts or config.residual_multiplier != 1 or dict(config.norms).keys() != {
            "input_layernorm", "post_attention_layernorm"}:
        return "in the small examples only: this model's layers have parts that yours has not"
    in_the_engine(setting)


class _Toy:
    """A layer whose four parts are small: what each gets is noted, and every mistake makes other numbers of it."""

    def __init__(self, hidden: int, sizes, dtype: torch.dtype):
        generator, size, tokens = torch.Generator().manual_seed(hidden), len(sizes), sum(sizes)
        self.sizes, self.dtype = list(sizes), dtype
        self.x, self.norms, self.mix, self.up, self.bias = (
            torch.randn(shape, generator=generator).to(dtype) for shape in (
                (tokens, hidden), (2, hidden), (size, hidden, hidden), (size, hidden, hidden), (hidden,)))

    def norm(self, which: int, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norms[which].float()).to(self.dtype)

    def attention(self, r: int, x: torch.Tensor) -> torch.Tensor:
        """Rank ``r``'s summand: each token sees those before it; the bias is rank 0's."""
        return torch.tanh(x.float().cumsum(0)).to(self.dtype) @ self.mix[r] + self.bias * (r == 0)

    def mlp(self, r: int, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) @ self.up[r] + self.bias * (r == 0)

    def called(self, attempt: Attempt) -> tuple[object, list[tuple[str, torch.Tensor]]]:
        """On a rank: what the answer returns, and which part it has called with which rows."""
        r, seen = rank(), []

        def part(name: str, of: Callable):
            def call(x):
                seen.append((name, tensor(x, "rows, hidden", (len(x), self.x.shape[1]), self.dtype,
                                          it=f"{name} is given").clone()))
                if name in ("attention", "mlp") and len(x) != len(self.x):
                    raise NotYet(f"{name} is given {len(x)} of {len(self.x)} rows: its heads and columns are this "
                                 "rank's, so it needs the rows of all")
                return of(x)
            return call

        return attempt(self.x.split(self.sizes)[r].clone(), self.sizes, part("input_norm", lambda x: self.norm(0, x)),
                    part("attention", lambda x: self.attention(r, x)), part("post_norm", lambda x: self.norm(1, x)),
                    part("mlp", lambda x: self.mlp(r, x))), seen

    def layer(self, norms=(0, 1), first=1.0, second=1.0, into=None, onto=None, sums=(sum, sum)) -> torch.Tensor:
        """The whole layer's output, or what one mistake makes of it. ``first``, ``second``: how often the residual is
        added; ``into``: what the MLP's norm gets instead; ``onto``: what the MLP is added to instead; ``sums``: what
        becomes of the ranks' summands."""
        ranks, x = range(len(self.sizes)), self.x

        def normed(which, t):
            return t if which is None else self.norm(which, t)

        between = first * x + sums[0]([self.attention(r, normed(norms[0], x)) for r in ranks])
        given = between if into is None else into
        return (second * between if onto is None else onto) + sums[1](
            [self.mlp(r, normed(norms[1], given)) for r in ranks])

    def with_sums(self, wrong: Callable) -> tuple[torch.Tensor, ...]:
        """The layer with one of its sums, or both, another one of the ranks' summands."""
        return tuple(self.layer(sums=sums) for sums in ((wrong, sum), (sum, wrong), (wrong, wrong)))

    def own_rows(self, summands: list) -> torch.Tensor:
        return torch.cat([summand.split(self.sizes)[r] for r, summand in enumerate(summands)])

    def cut_first(self, summands: list) -> torch.Tensor:
        own = self.own_rows(summands).split(self.sizes)
        return torch.cat([sum(own)] * len(own)) if len(set(self.sizes)) == 1 else torch.cat(own)

    def given(self, calls: list[list[tuple[str, torch.Tensor]]]) -> str:
        """The first part that is given other rows than it must get, of the rank's calls."""
        ranks, x = range(len(self.sizes)), self.x
        between = x + sum(self.attention(r, self.norm(0, x)) for r in ranks)
        right = {"input_norm": x, "attention": self.norm(0, x), "post_norm": between, "mlp": self.norm(1, between)}
        for r, seen in enumerate(calls):
            for at, (name, rows) in enumerate(seen):
                wanted = right[name] if len(rows) == len(x) else right[name].split(self.sizes)[r]
                if [one for one, _ in seen[:at]].count(name):
                    return f"on rank {r}, {name} is called {sum(one == name for one, _ in seen)} times: once is enough"
                if len(rows) != len(wanted):
                    return f"on rank {r}, {name} is given {len(rows)} rows; {len(wanted)} are a rank's own"
                if not torch.allclose(rows.float(), wanted.float(), 0, 6e-2):
                    parts = {what: part if len(rows) == len(x) else part.split(self.sizes)[r]
                             for what, part in self.parts().items()}
                    pair, fine = (rows.double(), wanted.double()), f"; {', '.join(one for one, _ in seen[:at])}: right"
                    return f"on rank {r}, {name} is given other rows than it must get{fine * bool(at)}\n" + (
                        made_of(*pair, 6e-2, ["row"], parts) or related(*pair, 6e-2, ["row"]) or where(
                            *pair, 6e-2, ["row"]))
        return f"each part gets the right rows ({', '.join(right)}), and what comes back is not their sum"

    def parts(self) -> dict[str, torch.Tensor]:
        """What the output may be the sum of."""
        ranks, x = range(len(self.sizes)), self.x
        attended = sum(self.attention(r, self.norm(0, x)) for r in ranks)
        between = x + attended
        return {"own, as it came in,": x, "input_norm's rows": self.norm(0, x), "attention's sum": attended,
                "post_norm's rows": self.norm(1, between),
                "the MLP's sum": sum(self.mlp(r, self.norm(1, between)) for r in ranks)}

    def judge(self, ran: list) -> None:
        size, values, x = len(self.sizes), [], self.x
        for number, ((value, _), _) in enumerate(ran):
            with saying(f"on rank {number} "):
                values.append(tensor(value, "rows kept, hidden", (self.sizes[number], x.shape[1]), self.dtype))
        within, given = 6e-2 if self.dtype == torch.bfloat16 else 1e-4, self.given([seen for (_, seen), _ in ran])
        agree(torch.cat(values), self.layer(), {
            "it comes back as it went in": x,
            "the first residual is missing": self.layer(first=0.0),
            "the second residual is missing": self.layer(second=0.0),
            "there is no residual in it": self.layer(first=0.0, second=0.0),
            f"the first residual is in it {size} times: is it added before the sum?": self.layer(first=size),
            f"the second residual is in it {size} times: is it added before the sum?": self.layer(second=size),
            f"both residuals are in it {size} times: are they added before the sum?":
                self.layer(first=size, second=size),
            "attention reads rows that are not normalised": self.layer(norms=(None, 1)),
            "the MLP reads rows that are not normalised": self.layer(norms=(0, None)),
            "the two norms are exchanged": self.layer(norms=(1, 0)),
            "the MLP is given what attention was given: what goes in behind the first residual?":
                (self.layer(into=x), self.layer(into=x, norms=(0, 0))),
            "the second residual is what came into the layer; attention belongs to it": self.layer(onto=x),
            "a rank goes on with its own summand of its rows: where are the others' added?":
                self.with_sums(self.own_rows),
            _CUT: self.with_sums(self.cut_first),
            "the MLP is missing": self.layer(sums=(sum, lambda summands: 0)),
            "attention is missing": self.layer(sums=(lambda summands: 0, sum))},
            given, within=within, parts=self.parts(), dims="" if "\n" in given else "row")
        for number, ((_, seen), log) in enumerate(ran):
            for name, given in seen:
                if "norm" in name and len(given) > self.sizes[number]:
                    raise NotYet(f"the rows are right, and on rank {number} {name} is given {len(given)} rows, of "
                                 f"which it keeps {self.sizes[number]}: normalise before you gather")
            ops = sorted(record.op for record in log)
            if ops != ["all_gather"] * 2 + ["reduce_scatter"] * 2:
                said = ", ".join(f"{ops.count(op)} × {op}" for op in dict.fromkeys(ops)) or "no collective"
                raise NotYet(f"the rows are right, and the op log holds {said}. Two sums of which a rank keeps its "
                             "rows, and two all_gathers, are enough")
