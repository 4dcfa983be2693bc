"""Notebook 06: both ends of the model, the one decision of all ranks, the loop around it, and a whole decoder layer."""

import math
from itertools import pairwise

import torch
from torch.nn import functional as F

from course.contiguous_cache import tensors_in
from course.exercises.own_engine import Stepper, layer_fits, listed, written
from course.judge.exercise import Example, Exercise, Most, at
from course.judge.toy_checkpoint import CountedCheckpoint, toy_model
from course.judge.words import NotYet, in_words
from course.judge.work import dealt, numbers, unchanged, whole_numbers
from tplab.align import hf_greedy
from tplab.align.points import layout
from tplab.checks import counted
from tplab.llm.llm import LLM
from tplab.model.rope import Rotary
from tplab.patch import Patch
from tplab.ranks import all_gather, all_reduce, op_log, rank, world_size
from tplab.shard import ShardPlan

ALONE = "one rank holds every word, so the collectives were tried on two and on three logical ranks"


def collectives() -> list[str]:
    return [record.op for record in op_log()]


def my_embedding(ids, weight_here, rows):
    is_here = (ids >= rows.start) & (ids < rows.stop)
    vectors = weight_here[(ids - rows.start).where(is_here, 0)]   # row 0 for the ids of other ranks …
    return all_reduce(vectors.masked_fill(~is_here[:, None], 0))  # … and zeros in its place


def words():
    several = [10, 0, 6, 3, 4, 2, 1, 7, 0, 10]
    for size, ids, dtype in ((2, [10, 0, 3], torch.float32), (2, [1, 0, 1], torch.float32),
                             (2, several, torch.bfloat16), (3, several, torch.float32)):
        rows = ", ".join(map(str, dealt(11, size)))
        yield Example(torch.tensor(ids), numbers(11, 14, dtype=dtype), ranks=size, says=(
            f"ids {ids}{' in bfloat16' * (dtype == torch.bfloat16)}, {size} ranks with rows {rows}"))


def looked_up(answer, ids, weight):
    rows = dealt(11, world_size())[rank()]
    rows_back = answer(ids, weight[rows.start:rows.stop], rows)
    if isinstance(rows_back, torch.Tensor) and rows_back.shape == (len(ids), weight.shape[1]):
        known = {"zeros": 0 * weight[0]} | {str(n): row for n, row in enumerate(weight)} | {
            f"{n} + {m}": row + weight[m] for n, row in enumerate(weight) for m in range(n + 1)}
        yield "it returns the rows of", [next((n for n, right in known.items() if torch.allclose(right.double(), row)),
                                              "other numbers") for row in rows_back.double()]
    yield "it returns", rows_back
    yield "the collectives are", collectives()


def my_best_offer(offer_here):
    offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))   # [sequences, ranks, (score, id)]
    winner = offers[:, :, 0].argmax(dim=-1)
    return offers[range(len(offers)), winner, 1].long()


def scores():
    tie, nan = 2.5, float("nan")
    for table in ([[5.0, 1.0], [1.0, 2.0]], [[-8.0, -2.0, -7.0], [5.0, 1.0, 2.0], [1.0, 0.5, 7.0], [0.5, tie, tie]],
                  [[-1.0, 2.0, -3.0]], [[-3.0, -1.0], [-2.0, -4.0], [tie, tie]],
                  [[1.0, 1.0 + 1e-12], [3.0, 1.0], [0.0, 4.0]], [[math.inf, nan]],
                  [[1.0, nan, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]):
        ids = [[40 * r + 10 - 3 * row for r in range(len(table[0]))] for row in range(len(table))]
        yield Example(torch.tensor(table, dtype=torch.float64), torch.tensor(ids), ranks=len(table[0]),
                      says=f"scores {table} for tokens {ids}, a column for each rank")


def decided(answer, table, ids):
    offer = torch.stack([table[:, rank()], ids[:, rank()].double()], dim=-1)
    before = offer.clone()
    yield "it returns", answer(offer)
    unchanged("offer_here", offer.allclose(before, equal_nan=True))
    yield "the collectives are", collectives()


def three_texts(setting, answer):
    prompts, reference = setting.reference(12)
    texts = setting.texts(prompts, 12, *setting.patches)
    if wrong := [number for number, pair in enumerate(zip(texts, reference)) if pair[0] != pair[1]]:
        raise NotYet(f"in the engine, the text of sequence {wrong[0]} is not Hugging Face's: on which rank does its "
                     "best token live?")


def my_generate(step, ids, count):
    new = [step(ids, range(len(ids)))]
    for position in range(len(ids), len(ids) + count - 1):
        new.append(step(new[-1:], [position]))
    return new


class Toy:
    """The next token depends on all tokens in the cache and on where they stand, or is of ``draws``."""

    def __init__(self, draws=()):
        self.cache, self.calls, self.drawn, self.draws = {}, [], [], iter(draws)

    def __call__(self, new_ids, positions):
        new_ids, positions = listed("new_ids", new_ids), listed("positions", positions)
        if len(new_ids) != len(positions) or not new_ids:
            raise ValueError(f"step was given {len(new_ids)} tokens and {len(positions)} positions")
        self.calls.append((new_ids, positions))
        if len(self.calls) > 300:
            raise NotYet("300 calls, and it goes on: what ends the loop?")
        self.cache.update(zip(positions, new_ids))
        self.drawn.append(next(self.draws, sum((p + 2) * (t + 1) for p, t in self.cache.items()) % 50))
        return self.drawn[-1]


def looped(answer, ids, count, draws):
    """Each token is computed once, where it stands, and the tokens that were drawn come back."""
    toy, text, prompt, have = Toy(draws), list(ids), list(ids), 0
    new_ids = whole_numbers(answer(toy, ids, count), "the new ids")
    for number, (new, positions) in enumerate(toy.calls, 1):
        have = 0 if new == text and positions == [*range(len(text))] else have  # the whole text once more: slow
        yield f"call {number} begins at position", positions[0], have
        yield f"call {number} has positions", positions, [*range(have, have + len(new))]
        yield f"call {number}, from position {have} on, has tokens", new, text[have:have + len(new)]
        have += len(new)
        text += [toy.drawn[number - 1]] * (have == len(text))
    yield "the number of new ids is", len(new_ids), count
    yield "it returns", new_ids, text[len(prompt):len(prompt) + count]
    yield "the tokens computed are", Most(sum(len(new) for new, _ in toy.calls), 1), Most(len(prompt) + count - 1, 1)
    yield "the calls of step are", Most(len(toy.calls), 1), Most(count, 1)


def in_a_loop(setting, answer):
    (ids, *_), (reference, *_) = setting.reference(24)
    try:
        with LLM(setting.model, setting.tensor_parallel_size, setting.dtype, enable_prefix_caching=False) as llm:
            step = Stepper(llm, 24)
            new_ids, computed = answer(step, list(ids), 24), step.computed
    except Exception as error:  # of the learner's loop
        raise NotYet(f"in the engine: {in_words(error)}") from error
    if new_ids != reference:
        raise NotYet("in the engine, the text is not Hugging Face's, though the toy's was right: what is different "
                     "with other tokens?")
    whole = sum(len(ids) + i for i in range(24))  # when each step reads the text from its beginning
    return f"{computed:,} tokens computed for them, {whole:,} if none were kept"


class MyLayer:
    def __init__(self, weights, here, config):
        self.here, self.d, self.eps = here, config.head_dim, config.rms_norm_eps
        q, kv = (slice(heads.start * self.d, heads.stop * self.d) for heads in (here.q_heads, here.kv_heads))
        mlp = slice(here.mlp.start, here.mlp.stop)

        def stacked(kind):
            names = [(f"self_attn.{name}_proj.{kind}", rows) for name, rows in (("q", q), ("k", kv), ("v", kv))]
            return torch.cat([weights[name][rows] for name, rows in names if name in weights] or [torch.zeros(1)])

        self.qkv, self.bias = stacked("weight"), stacked("bias")
        self.o = weights["self_attn.o_proj.weight"][:, q]
        self.gate, self.up = (weights[f"mlp.{name}_proj.weight"][mlp] for name in ("gate", "up"))
        self.down = weights["mlp.down_proj.weight"][:, mlp]
        self.norm1, self.norm2 = (weights[f"{name}_layernorm.weight"][:] for name in ("input", "post_attention"))
        self.k = self.v = torch.zeros(0, len(here.kv_heads), self.d)

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def turn(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]

    def attend(self, q, start):
        k, v = self.k[:, self.here.kv_for_q], self.v[:, self.here.kv_for_q]
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.d ** -0.5
        future = torch.arange(len(k)) > torch.arange(start, len(k))[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)

    def __call__(self, hidden, cos, sin, point):
        x = point("input_norm", self.norm(hidden, self.norm1))
        heads = (x @ self.qkv.T + self.bias).unflatten(-1, (-1, self.d))
        q, k, v = heads.split([len(self.here.q_heads), *2 * [len(self.here.kv_heads)]], dim=1)
        point("q", q), point("k", k), point("v", v)
        q, k = point("q_rope", self.turn(q, cos, sin)), point("k_rope", self.turn(k, cos, sin))
        start = len(self.k)
        self.k, self.v = torch.cat([self.k, k]), torch.cat([self.v, v])
        out = point("attn", self.attend(q, start))
        hidden = point("residual", hidden + point("o_proj", all_reduce(out.flatten(1) @ self.o.T)))
        x = point("post_norm", self.norm(hidden, self.norm2))
        inner = F.silu(x @ self.gate.T) * (x @ self.up.T)
        return point("output", hidden + point("mlp", all_reduce(inner @ self.down.T)))


POINTS = ("input_norm", "q", "k", "v", "q_rope", "k_rope", "attn", "o_proj", "residual", "post_norm", "mlp", "output")
STEPS = (0, 5, 8, 9, 10)  # a prompt of 5, a chunk of 3, two tokens


def in_steps(cls, toy, plan):
    """On a rank: of each step what was shown at each point, and last what came back; the bytes read of each weight;
    the bytes that the layer keeps of all tokens."""
    counted, shard, shown = CountedCheckpoint(toy), plan.ranks[rank()], []
    with torch.inference_mode(), counted.reader() as files, toy.reader() as uncounted:
        embed = uncounted["model.embed_tokens.weight"][:][3:3 + STEPS[-1]]
        cos, sin = Rotary(toy.config.hf)(embed, torch.arange(STEPS[-1]), [(STEPS[-1],) * 2])
        weights = {name.removeprefix("model.layers.0."): files[name] for name in toy.tensors if ".layers.0." in name}
        layer = cls(weights, shard, toy.config)
        before = sum(tensor.nbytes for tensor in tensors_in(layer))
        for start, stop in pairwise(STEPS):
            shown.append(points := {})

            def point(name, value, points=points):
                if name not in POINTS:
                    raise ValueError(f"there is no point {name!r}; there are {', '.join(POINTS)}")
                heads = getattr(shard, layout(name), None)
                if isinstance(value, torch.Tensor) and heads is not None and value.dim() == 2:
                    points[name] = value.unflatten(-1, (len(heads), -1)).clone()  # heads side by side are as good
                else:
                    points[name] = value.clone() if isinstance(value, torch.Tensor) else value
                return value

            point("output", layer(*(x[start:stop].clone() for x in (embed, cos[0], sin[0])), point))
    return shown, counted.taken, sum(tensor.nbytes for tensor in tensors_in(layer)) - before


def layer_in_steps(cls, heads, kv_heads, size, llama):
    more = {"model_type": "llama", "attention_bias": False, "hidden_size": 24} if llama else {}
    toy = toy_model(heads, kv_heads, **more)
    plan = ShardPlan.from_config(toy.config, size)
    right, needed, enough = in_steps(MyLayer, toy, plan)
    before = len(collectives())
    shown, taken, kept = in_steps(cls, toy, plan)
    for points, must, (start, stop) in zip(shown, right, pairwise(STEPS)):
        given = [name for name in POINTS if name in points]
        for name in given:
            so_far = ""
            if name == "output" and len(given) > 1:
                so_far = f" (right up to {given[-2]}; the next is {POINTS[POINTS.index(given[-2]) + 1]})"
            yield f"tokens {start} to {stop - 1}: point {name!r}{so_far}", points[name], must[name]
    passes = len(shown)
    yield f"the collectives of {passes} passes are", collectives()[before:], ["all_reduce"] * 2 * passes
    yield f"the bytes that it keeps of {STEPS[-1]} tokens are", Most(kept, 2), Most(enough)
    for name in taken:
        yield (f"the bytes that are read of {name.removeprefix('model.layers.0.')} are", Most(taken[name], 1.01),
               Most(needed[name]))


def all_layers(setting, answer):
    ckpt, ids = setting.checkpoint, setting.ids(8)
    if not layer_fits(ckpt):
        return "in the small examples only: this checkpoint's layers have parts that yours has not"
    if written(answer, ckpt, ids, 16, tensor_parallel_size=setting.tensor_parallel_size) != hf_greedy(ckpt, ids, 16):
        raise NotYet(f"all layers of {ckpt.name} in a row: their text is not Hugging Face's, though one layer was "
                     "right by itself")


_SUM = "all_reduce(vectors.masked_fill(~is_here[:, None], 0))"
_ROWS = "weight_here[(ids - rows.start).where(is_here, 0)]"
EXERCISES = [
    Exercise("06", my_embedding, words, {
        "each rank returns the rows that it has: where does it get those of the other ranks?": (
            f"{_SUM} -> vectors.masked_fill(~is_here[:, None], 0)",
            f"{_ROWS} -> weight_here[ids % len(rows)] ;; {_SUM} -> vectors"),
        "for a token of another rank, one of this rank's rows is added: add zeros": (
            f"{_SUM} -> all_reduce(vectors)",
            f"{_ROWS} -> weight_here[(ids - rows.start).clamp(0, len(rows) - 1)] ;; {_SUM} -> all_reduce(vectors)",
            f"{_ROWS} -> weight_here[ids % len(rows)] ;; {_SUM} -> all_reduce(vectors)"),
        "the ranks need not have equally many rows: those of this rank begin at rows.start":
            ("(ids >= rows.start) & (ids < rows.stop) -> ids // len(rows) == rank() ;; "
             "(ids - rows.start) -> (ids - rank() * len(rows))",
             "(ids - rows.start).where(is_here, 0) -> (ids - rank() * len(rows)).clamp(0, len(rows) - 1)",
             "(ids >= rows.start) & (ids < rows.stop) -> (0 <= ids - rank() * len(rows)) & "
             "(ids - rank() * len(rows) < len(rows)) ;; (ids - rows.start) -> (ids - rank() * len(rows))"),
        "rows.stop is the first row of the next rank, not of this one": (
            "ids < rows.stop -> ids <= rows.stop ;; (is_here, 0) -> (is_here, 0).clamp(max=len(rows) - 1)",
            "ids < rows.stop -> ids <= rows.stop ;; (is_here, 0) -> (is_here, 0) % len(rows)"),
    }, observe=looked_up, dims="token, number", place="looks up embeddings", alone=ALONE,
             patches=lambda answer: [Patch("tplab.shard.embedding.VocabParallelEmbedding.forward",
                                           lambda self, ids: answer(ids, self.weight, self.rows))]),
    Exercise("06", my_best_offer, scores, {
        "rank 0's token comes back for every sequence: which rank is best for each of them?": "winner, 1] -> 0, 1]",
        "the best rank of one sequence decides for all of them": (
            "winner, 1] -> winner[0], 1]", "offers[range(len(offers)), winner, 1] -> "
            "offers[0, winner[0], 1].repeat(len(offers))"),
        "the ids of row 0 come back for every sequence":
            "offers[range(len(offers)), winner, 1] -> offers[0, winner, 1]",
        "that is the number of the rank with the best score; which token does it offer?":
            "offers[range(len(offers)), winner, 1].long() -> winner",
        "in row i, the entry of winner[i] is asked for, and the entries of all winners come back":
            "offers[range(len(offers)), winner, 1] -> offers[:, winner, 1]",
        "NaN counts as the largest, as in torch.argmax; else a broken model would go unnoticed":
            "offers[:, :, 0].argmax -> offers[:, :, 0].nan_to_num(-1e9).argmax",
        "two ranks offer the same score. torch.argmax over the whole vocabulary takes the lowest id":
            "offers[:, :, 0].argmax(dim=-1) -> offers.shape[1] - 1 - offers[:, :, 0].flip(1).argmax(dim=-1)",
    }, "on {ranks}, three sequences get the tokens of Hugging Face", decided, at("tplab.engine.sampler.best_offer"),
             three_texts, dims="sequence", place="chooses the next token"),
    Exercise("06", my_generate, lambda: [Example(*args, says=f"a prompt of {len(args[0])}, {args[1]} new") for args in (
        ([3, 1, 4, 1, 5], 4, ()), ([*range(20, 63)], 24, ()), ([9, 9], 1, ()), ([24], 5, (0, 0, 3, 2, 11)))], {
        "only the new ids come back, without the prompt": "return new -> return [*ids, *new]",
        "positions count from 0: behind a prompt of n tokens, the first new one stands at n":
            "[position] -> [position + 1]",
        "positions go on behind the prompt, and do not begin at 0 again": (
            "[position] -> [0]", "[position] -> [position - len(ids)]"),
        "the text so far is computed anew in every step: the engine keeps keys and values":
            "step(new[-1:], [position]) -> step(ids + new, range(len(ids) + len(new)))",
        "one call too many: nothing reads the token that comes after the last one":
            "count - 1 -> count ;; return new -> return new[:-1]",
    }, "on {ranks}, 24 tokens are Hugging Face's", looped, engine=in_a_loop,
             place="runs the loop of generation"),  # it calls the engine: see own_engine.py
    Exercise("06", MyLayer, lambda: [
        Example(*args, ranks=args[2], says=f"{args[0]} query and {args[1]} KV heads over {counted(args[2], 'rank')}")
        for args in ((8, 2, 1, False), (8, 2, 2, False), (9, 3, 2, False), (8, 2, 3, True))], {
        "the sum over the ranks after o_proj is missing":
            "all_reduce(out.flatten(1) @ self.o.T) -> out.flatten(1) @ self.o.T",
        "the sum over the ranks after down_proj is missing": "all_reduce(inner @ self.down.T) -> inner @ self.down.T",
        "every rank adds the residual before the sum, so it is counted once for each rank": (
            'hidden + point("o_proj", all_reduce(out.flatten(1) @ self.o.T)) -> '
            "all_reduce(hidden + out.flatten(1) @ self.o.T)",
            'hidden + point("mlp", all_reduce(inner @ self.down.T)) -> all_reduce(hidden + inner @ self.down.T)'),
        "this rank's heads begin at here.q_heads.start and here.kv_heads.start, not at 0":
            "slice(heads.start * self.d, heads.stop * self.d) -> slice(0, len(heads) * self.d)",
        "the input of the layer is added to the output of the MLP, in the place of the residual":
            'hidden = point("residual" -> rest = point("residual" ;; (hidden, self.norm2) -> (rest, self.norm2)',
        "rms_norm_eps is not added to the mean": " + self.eps -> ",
        "the rotation pairs neighbours, numbers 0 and 1; this model pairs number i with number i + head_dim / 2": (
            "a, b = x.chunk(2, dim=-1) -> a, b = x[..., ::2], x[..., 1::2]",
            "a, b = x.chunk(2, dim=-1) -> a, b = x[..., ::2], x[..., 1::2] ;; "
            "torch.cat([-b, a], dim=-1) -> torch.stack([-b, a], dim=-1).flatten(-2)"),
        "scores are divided by the root of head_dim": ("* self.d ** -0.5 -> / self.d", "* self.d ** -0.5 -> "),
        "an RMSNorm subtracts no mean": "return x * torch.rsqrt(x.pow(2) -> x = x - x.mean(-1, keepdim=True); "
            "return x * torch.rsqrt(x.pow(2)",
        "the residual is the input of the norm, not its output": (
            'hidden + point("o_proj" -> x + point("o_proj"', 'hidden + point("mlp" -> x + point("mlp"'),
        "the rotation has the other direction": "torch.cat([-b, a] -> torch.cat([b, -a]",
        "the bias of q, k or v is missing": "x @ self.qkv.T + self.bias -> x @ self.qkv.T",
        "silu belongs to gate, and up has it": "F.silu(x @ self.gate.T) * (x @ self.up.T) -> "
            "(x @ self.gate.T) * F.silu(x @ self.up.T)",
        "the numbers of one head must stay together when the heads are joined":
            "out.flatten(1) -> out.transpose(1, 2).flatten(1)",
        "the keys in the cache are not rotated": "q, k = point(\"q_rope\" -> unturned, q, k = k, point(\"q_rope\" ;; "
            "torch.cat([self.k, k]) -> torch.cat([self.k, unturned])",
        "the keys in the cache are rotated twice":
            "torch.cat([self.k, k]) -> torch.cat([self.k, self.turn(k, cos, sin)])",
        "queries are counted from key 0 on: in a chunk, the first one stands behind the cache":
            "torch.arange(start, len(k))[:, None] -> torch.arange(len(q))[:, None]",
        "the cache is not used: where are the keys and values of earlier tokens?":
            "torch.cat([self.k, k]), torch.cat([self.v, v]) -> k, v ;; start = len(self.k) -> start = 0",
        "a query head reads another KV head than kv_for_q says: the rank's heads may not divide": (
            "self.here.kv_for_q -> [i * self.k.shape[1] // q.shape[1] for i in range(q.shape[1])]",
            "self.here.kv_for_q -> [i % self.k.shape[1] for i in range(q.shape[1])]"),
        "the cache holds each KV head once: repeat heads only for attention":
            "zeros(0, len(here.kv_heads) -> zeros(0, len(here.q_heads) ;; "
            "self.k[:, self.here.kv_for_q], self.v[:, self.here.kv_for_q] -> self.k, self.v ;; "
            "self.k, k]), torch.cat([self.v, v] -> self.k, k[:, self.here.kv_for_q]]), "
            "torch.cat([self.v, v[:, self.here.kv_for_q]]",
        "nothing is hidden: no query may see later keys": '.masked_fill(future, float("-inf")) -> ',
        "a token sees itself: only later keys are hidden": "> torch.arange(start -> >= torch.arange(start",
        "index a weight with the slice that you need: [:] reads all of it": (
            "[name][rows] -> [name][:][rows] ;; [:, q] -> [:][:, q] ;; ][mlp] -> ][:][mlp] ;; [:, mlp] -> [:][:, mlp]",
            "[name][rows] -> [name][:][rows]", "][mlp] -> ][:][mlp]", "[:, q] -> [:][:, q]", "[:, mlp] -> [:][:, mlp]",
            "[:, q] -> [:][:, q] ;; [:, mlp] -> [:][:, mlp]"),
        "the two norms have changed places": "self.norm1, self.norm2 -> self.norm2, self.norm1",
        "hidden comes back as it went in": "def __call__(self, hidden, cos, sin, point): -> "
            "def __call__(self, hidden, cos, sin, point): return hidden\n    def other(self, hidden, cos, sin, point):",
    }, "every point that it gives is Hugging Face's, two sums a pass, and all layers of the model on {ranks} write "
       "its text", layer_in_steps, engine=all_layers, dims="token, head, number")]
