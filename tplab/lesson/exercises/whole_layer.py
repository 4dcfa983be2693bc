"""Notebook 06: a whole decoder layer from an empty cell, judged point by point beside Hugging Face."""

import sys

import torch

from tplab.align import hf_greedy
from tplab.align.reference import hf_trace
from tplab.lesson.exercises.attention import attention_ways
from tplab.lesson.exercises.rotation import misturned
from tplab.lesson.mine import Mine, NotYet, agree, guarded, is_learners, kept, on_ranks, tensor
from tplab.lesson.own_layers import layer_fits, written
from tplab.lesson.toy_checkpoint import ToyCheckpoint
from tplab.lesson.verdict import Setting, exercise
from tplab.model.attention import attend
from tplab.ranks import rank
from tplab.shard import ShardPlan

POINTS = ("input_norm", "q", "k", "v", "q_rope", "k_rope", "attn", "o_proj", "residual", "post_norm", "mlp", "output")
STEPS = (0, 5, 8, 9, 10)  # a prompt of 5, a chunk of 3, two tokens
_COUNT = 16


@exercise("MyLayer", "06", takes="weights, here, config",
          agreed="every point is Hugging Face's, two sums a pass, and all layers of the model on {ranks} write its "
                 "text")
def my_layer(mine: Mine, setting: Setting):
    """One layer with 8/2 and 9/3 heads on 2 ranks and 8/2 on 3, in steps; then all layers of the notebook's model."""
    for heads, kv_heads, size in ((8, 2, 2), (9, 3, 2), (8, 2, 3)):
        toy = _Toy(heads, kv_heads, size)
        ran = on_ranks(size, _in_steps, mine, toy, waits="A layer has two sums, and every rank comes to both of them")
        judges = [_Judge(toy, number, steps) for number, ((steps, _), _) in enumerate(ran)]
        for at, rows in enumerate(map(slice, STEPS, STEPS[1:])):
            for name in (*POINTS, ""):  # of every rank, before the next one is looked at; "" is what comes back
                for judge in judges:
                    judge.look(at, rows, name)
        for judge, ((_, read), ops) in zip(judges, ran):
            judge.cost(read, [record.op for record in ops])
    ckpt, ids = setting.checkpoint, setting.ids(8)
    if not layer_fits(ckpt):
        return "in the small examples only: this checkpoint's layers have parts that yours has not"
    found = written(mine.function, ckpt, ids, _COUNT, tensor_parallel_size=setting.tensor_parallel_size)
    right = hf_greedy(ckpt, ids, _COUNT)
    if found != right:
        at = next(i for i, pair in enumerate(zip(found, right)) if pair[0] != pair[1])
        raise NotYet(f"all layers of {ckpt.name} in a row: token {at} of its text is not Hugging Face's, though one "
                     f"layer "
                     "was right by itself: is something shared between two layers, the cache, say?")


class _Toy:
    """A model of one layer in transformers, its points over ten tokens, and its weights as a rank may read them."""

    def __init__(self, heads: int, kv_heads: int, size: int):
        from transformers import Qwen2Config, Qwen2ForCausalLM

        self.heads, self.what = heads, f"{heads} query and {kv_heads} KV heads over {size} ranks"
        config = Qwen2Config(hidden_size=20, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=6,
                             intermediate_size=25, vocab_size=40, num_hidden_layers=1, attn_implementation="eager")
        with torch.random.fork_rng():
            torch.manual_seed(heads)
            model = Qwen2ForCausalLM(config).eval()
            for name, parameter in model.named_parameters():
                parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
        self.points = {name.removeprefix("layers.0."): value for name, value in hf_trace(
            model, list(range(3, 3 + STEPS[-1]))).items()}
        with torch.inference_mode():
            self.cos, self.sin = (table[0] for table in model.model.rotary_emb(
                self.points["embed"][None], torch.arange(STEPS[-1])[None]))
        at = "model.layers.0."
        self.weights = {name.removeprefix(at): value for name, value in model.state_dict().items() if at in name}
        self.plan = ShardPlan.make(tensor_parallel_size=size, num_heads=heads, num_kv_heads=kv_heads, head_dim=6,
                                   hidden_size=20, intermediate_size=25, vocab_size=40)
        self.config = config

    def __deepcopy__(self, memo):
        return self


class _Points:
    """``point(name, tensor)`` as a learner's layer calls it: copies, each with the line of the call."""

    def __init__(self):
        self.seen: dict[str, tuple[object, int]] = {}

    def __call__(self, name, value):
        if name not in POINTS:
            raise ValueError(f"there is no point {name!r}; there are {', '.join(POINTS)}")
        frame = sys._getframe(1)
        while frame.f_back is not None and not is_learners(frame.f_code.co_filename):
            frame = frame.f_back
        self.seen[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value, frame.f_lineno
        return value


def _in_steps(mine: Mine, toy: _Toy) -> tuple[list, int]:
    """On a rank: what each step passed and returned; how many bytes were read."""
    files, here, steps = ToyCheckpoint(toy.weights), toy.plan.ranks[rank()], []
    layer = guarded(mine.function, {name: files.reader()[name] for name in toy.weights}, here, toy.config)
    if not callable(layer):
        raise NotYet("what it makes cannot be called: layer(hidden, cos, sin, point) needs a method __call__")
    layer = kept(layer.__call__, "hidden, cos, sin, point")
    with torch.inference_mode():
        for start, stop in zip(STEPS, STEPS[1:]):
            hidden, cos, sin = (x[start:stop].clone() for x in (toy.points["embed"], toy.cos, toy.sin))
            points = _Points()
            out = guarded(layer, hidden, cos, sin, points)
            steps.append((points.seen, out.clone() if isinstance(out, torch.Tensor) else out))
    return steps, sum(files.taken.values())


class _Judge:
    """What one rank's layer has done, beside Hugging Face's."""

    def __init__(self, toy: _Toy, number: int, steps: list):
        self.toy, self.here, self.size, self.steps = toy, toy.plan.ranks[number], len(toy.plan.ranks), steps
        self.where, self.right = f"{toy.what}, rank {number}", ""

    def look(self, at: int, rows: slice, name: str) -> None:
        """At one point of one step, if it was shown."""
        (seen, out), self.rows = self.steps[at], rows
        self.now = f"{self.where}, {_tokens(rows)}"
        if not name:
            self._point("output", out, "what it returns")
        elif name in seen:
            value, line = seen[name]
            self._point(name, value, f"point {name!r}, your line {line}")
            self.right = f"{name!r}, your line {line}"

    def cost(self, read: int, ops: list[str]) -> None:
        """What it needs for that: sums, and bytes of weights."""
        if ops != ["all_reduce"] * 2 * (len(STEPS) - 1):
            raise NotYet(f"{self.where}: the numbers are right, with {len(ops)} collectives in {len(STEPS) - 1} passes "
                         f"({', '.join(dict.fromkeys(ops)) or 'none'}); two all_reduces a pass are enough: one behind "
                         "attention, one behind the MLP")
        kept = sum(self._part(name, weight).nbytes for name, weight in self.toy.weights.items())
        if read > kept:
            raise NotYet(f"{self.where}: the numbers are right, and it reads {read:,} bytes of weights; its own part "
                         f"has "
                         f"{kept:,}: slice before you keep")

    def _point(self, name: str, value, what: str) -> None:
        right = self._own(name)
        if isinstance(value, torch.Tensor) and right.dim() == 3 and value.shape == (len(right), right[0].numel()):
            value = value.view(right.shape)  # heads side by side are as good
        head = f"{self.now}: {what}"
        try:
            dims = "new tokens, heads here, head_dim" if right.dim() == 3 else "new tokens, hidden"
            value = tensor(value, dims, right.shape, right.dtype)
        except NotYet as wrong:
            raise NotYet(f"{head}: {str(wrong).replace('it returns', 'comes as', 1)}") from None
        tail = (f"Right up to {self.right}" if self.right else "It is the first point" if name == POINTS[0] else
                "Nothing before it was shown: call point(…) on the way")
        if value.isnan().any() and name != "attn":
            raise NotYet(f"{head} holds NaN\n{tail}")
        off = "holds NaN: is there a token that may look at no key?" if value.isnan().any() else (
            f"is off by {(value - right).abs().max():.1g} where numbers go up to {right.abs().max():.2g}")
        agree(value.nan_to_num(), right, {f"{head}: {says}{f'{chr(10)}{tail}' * bool(self.right)}": guess
                             for says, guess in self._ways(name).items()},
              f"{head} {off}\n{tail}")

    def _own(self, name: str) -> torch.Tensor:
        """Of Hugging Face's point, what this rank has in this step."""
        whole = self.toy.points[name][self.rows]
        if name in ("q", "q_rope", "attn"):
            return whole[:, self.here.q_heads.start:self.here.q_heads.stop]
        return whole[:, self.here.kv_heads.start:self.here.kv_heads.stop] if name in ("k", "v", "k_rope") else whole

    def _part(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of a weight."""
        d, kinds = self.toy.config.head_dim, {"q": self.here.q_heads, "o": self.here.q_heads, "k": self.here.kv_heads,
                                              "v": self.here.kv_heads}
        layer = name.split(".")[1][:-len("_proj")] if "_proj" in name else ""
        if not layer:
            return weight
        own = kinds.get(layer)
        rows = slice(own.start * d, own.stop * d) if own is not None else slice(self.here.mlp.start, self.here.mlp.stop)
        return weight[:, rows] if layer in ("o", "down") else weight[rows]

    def _ways(self, name: str) -> dict[str, torch.Tensor]:
        """What this point is if its inputs are right and one mistake is made."""
        p, rows, w, config = self.toy.points, self.rows, self.toy.weights, self.toy.config
        part = {key: self._part(key, weight) for key, weight in w.items()}
        x, d = p["embed"][rows], config.head_dim

        def normed(x, weight):
            return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

        if name in ("input_norm", "post_norm"):
            first = name == "input_norm"
            x = x if first else p["residual"][rows]
            own, other = (w[f"{key}_layernorm.weight"] for key in ("input", "post_attention")[::1 if first else -1])
            return {"the mean is subtracted, as a LayerNorm does; an RMSNorm only "
                    "divides": normed(x - x.mean(-1, True), own),
                    "the norm's weight is missing": normed(x, 1), "it has the other norm's weight": normed(x, other),
                    "the squares are added up, and their mean is meant": normed(x, own) / x.shape[-1] ** 0.5,
                    "one mean is taken over all tokens; each token has its own": x * (
                        x.pow(2).mean() + config.rms_norm_eps).rsqrt() * own,
                    "it is not normed": x, "it is made from what goes into the layer": normed(p["embed"][rows], own)}
        if name in ("q", "k", "v"):
            key, heads = f"self_attn.{name}_proj.", len(self._own(name)[0])
            weight, bias, into = part[key + "weight"], part[key + "bias"], p["input_norm"][rows]
            other = {"k": "v", "v": "k"}.get(name)
            out = into @ weight.T + bias
            return {"the bias is missing": (out - bias).view(-1, heads, d),
                    "it is made from what goes into the layer, and the norm is "
                    "skipped": (x @ weight.T + bias).view(-1, heads, d),
                    "heads and head_dim have changed places in the view": out.view(-1, d, heads).transpose(1, 2),
                    "these are the first heads there are; where do this rank's begin?": p[name][rows][:, :heads],
                    **({f"it is {other}: in which order are q, k and v stacked?": self._own(other)} if other else {})}
        if name in ("q_rope", "k_rope"):
            return misturned(self._own(name[0]), *(table[rows][:, None] for table in (self.toy.cos, self.toy.sin)))
        if name == "attn":
            return self._attended()
        if name in ("o_proj", "mlp"):
            partial, whole = self._partial(name), p[name][rows]
            gate, up, down = (w[f"mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
            into, silu, gelu = p["post_norm"][rows], torch.nn.functional.silu, torch.nn.functional.gelu
            raw = p["residual"][rows]
            inner = {"gate reads what the norm has not seen": silu(raw @ gate.T) * (into @ up.T),
                     "up reads what the norm has not seen": silu(into @ gate.T) * (raw @ up.T),
                     "gate and up have changed places: which one goes through "
                     "silu?": silu(into @ up.T) * (into @ gate.T),
                     "the activation is missing": (into @ gate.T) * (into @ up.T),
                     "this is gelu; the model's activation is silu": gelu(into @ gate.T) * (into @ up.T),
                     "silu goes over the product; it belongs to gate alone": silu((into @ gate.T) * (into @ up.T))}
            return {"this is the rank's own summand: who adds them up?": partial,
                    f"this is {self.size} times the sum: it is added up twice": self.size * whole,
                    "the summands are averaged": whole / self.size,
                    "the ranks' parts meet the same weights: does every rank take the first ones, or does the sum come "
                    "first?":
                        self._firsts(name),
                    "the residual is in it already": whole + p["embed" if name == "o_proj" else "residual"][rows],
                    **({says: value @ down.T for says, value in inner.items()} if name == "mlp" else {})}
        into, more = ("embed", "o_proj") if name == "residual" else ("residual", "mlp")
        normed_in = "input_norm" if name == "residual" else "post_norm"
        return {"hidden comes back as it went in": x,
                f"only {more} is there: what is it added to?": p[more][rows],
                f"{more} is added to the normed numbers; the residual goes around the "
                f"norm": p[normed_in][rows] + p[more][rows],
                "attention's part is lost: the second sum begins with what the first one made":
                    x + p[more][rows] if name == "output" else p[more][rows],
                f"the residual is in it {self.size} times: is it added on every rank, before the "
                f"sum?": p[into][rows] * self.size + p[more][rows]}

    def _partial(self, name: str) -> torch.Tensor:
        w, own = self.toy.weights, self.here.mlp
        if name == "o_proj":
            return self._own("attn").flatten(1) @ self._part("self_attn.o_proj.weight", w["self_attn.o_proj.weight"]).T
        return self.toy.points["mlp_act"][self.rows][:, own.start:own.stop] @ self._part(
            "mlp.down_proj.weight", w["mlp.down_proj.weight"]).T

    def _firsts(self, name: str) -> torch.Tensor:
        """The sum where every rank takes the first rows and columns that there are."""
        p, w, rows, total = self.toy.points, self.toy.weights, self.rows, 0
        for here in self.toy.plan.ranks:
            if name == "o_proj":
                own, down = p["attn"][rows][:, here.q_heads.start:here.q_heads.stop].flatten(1), "self_attn.o"
            else:
                gate, up = (p["post_norm"][rows] @ w[f"mlp.{one}_proj.weight"][:len(here.mlp)].T for one in (
                      "gate", "up"))
                own, down = torch.nn.functional.silu(gate) * up, "mlp.down"
            total = total + own @ w[f"{down}_proj.weight"][:, :own.shape[1]].T
        return total

    def _attended(self) -> dict:
        """What attention gives with a mistake in the cache, or in which KV head is read; then those of notebook 04."""
        p, q, own, reads = self.toy.points, self._own("q_rope"), self.here.kv_heads, list(self.here.kv_for_q)
        start, stop, scale = self.rows.start, self.rows.stop, q.shape[-1] ** -0.5
        k, raw, v = (p[name][:stop, own.start:own.stop] for name in ("k_rope", "k", "v"))
        future = torch.arange(stop) > torch.arange(start, stop)[:, None]

        def each(x, reads=reads):  # one KV head for each query head
            return x[:, reads].transpose(0, 1)[None]

        def attended(keys=k, values=v, hidden=future, reads=reads):
            return attend(q.transpose(0, 1)[None], each(keys, reads), each(values, reads), hidden, scale)

        new = slice(start, stop)
        found = {
            "only the new keys are read: where are those of the steps "
            "before?": attended(k[new], v[new], future[:, new]),
            "the mask counts rows: the first new token does not stand at 0": attended(
                hidden=torch.arange(stop) > torch.arange(stop - start)[:, None]),
            "the keys in the cache are not turned": attended(raw),
            "only the new keys are turned, those in the cache are not": attended(torch.cat([raw[:start], k[new]])),
            "query head 1 reads KV head 1; neighbours share a KV head: see here.kv_for_q": attended(
                reads=[head % len(own) for head in range(len(reads))]),
            "every query head reads the rank's first KV head": attended(reads=[0] * len(reads)),
            **attention_ways(q.transpose(0, 1)[None], each(k), each(v), future[None, None], scale)}
        return {says: tuple(one[0].transpose(0, 1) for one in (some if isinstance(some, tuple) else (some,)))
                for says, some in found.items()}


def _tokens(rows: slice) -> str:
    if rows.start == 0:
        return f"a prompt of {rows.stop} tokens"
    new = rows.stop - rows.start
    return f"{new} token{'s' * (new > 1)} behind {rows.start}"
