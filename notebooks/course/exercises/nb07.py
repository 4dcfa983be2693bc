"""Notebook 07: read what is kept: a slice of a slice, a loader, and a disagreement that no rank sees alone."""

from types import SimpleNamespace

import torch

from course.judge.differ import differs
from course.judge.exercise import Example, Exercise, Most
from course.judge.toy_checkpoint import CountedCheckpoint, ToySource, toy_model
from course.judge.words import NotYet, in_words
from course.judge.work import one_number
from course.random_weights import random_tensors
from tplab.checkpoint.layout import by_parameter, tensor_parts
from tplab.model.decoder import TensorParallelCausalLM
from tplab.patch import Patch, original
from tplab.pool import shared_pool
from tplab.ranks import RankError, all_gather, rank
from tplab.shard import ShardPlan

ALONE = "one rank keeps everything, so it was judged on examples with 2 and 3"
LOAD = "tplab.model.loader.load_model"


class MyRows:
    def __init__(self, source, start, shape):
        self.source, self.start, self.shape = source, start, shape

    def __getitem__(self, rows):
        first, last, _ = rows.indices(self.shape[0])
        return self.source[self.start + first:self.start + last]


def sliced(cls, start, shape, of_a_part, wanted):
    """Each slice is what a list of these rows would give, and costs no other row. Numbers say where they stand."""
    columns = shape[1:] and torch.arange(*shape[1:])
    source = ToySource(20 * torch.arange(16.0)[:, None] + columns if shape[1:] else torch.arange(16.0).half())
    made = cls(source, start, shape)
    if of_a_part:
        made, start, shape = cls(made, *of_a_part), start + of_a_part[0], of_a_part[1]
    yield "the bytes that making it reads are", source.taken, 0
    found = getattr(made, "shape", None)
    yield "its .shape is", [*found] if isinstance(found, list | tuple | torch.Size) else found, [*shape]
    own = source.whole[start:start + shape[0]]
    for rows in wanted:
        first, last = ("" if one is None else one for one in (rows.start, rows.stop))
        source.taken, call = 0, f"part[{first}:{last}]"
        yield f"{call} gives", made[rows], own[rows]
        yield f"the bytes that {call} reads are", Most(source.taken, 1.01), Most(own[rows].nbytes)


def parts():
    some = (slice(2, 5), slice(0, 7), slice(None), slice(5, None), slice(None, 3), slice(0, 0), slice(None, 0),
        slice(-3, None),
            slice(1, -2), slice(2, 5))
    yield Example(4, (7, 5), None, some, says="rows 4–10 of a source of 16 rows, whose row r has 20 r, 20 r + 1, …")
    yield Example(3, (8,), None, some[:3], says="numbers 3–10 of a bias of 16")
    yield Example(4, (7, 5), (2, (4, 5)), (slice(1, 3),), says="rows 2–5 of rows 4–10, a slice of a slice")


def of_a_file(setting, answer):
    ckpt, name = setting.checkpoint, "model.embed_tokens.weight"
    count, head = ckpt.tensors[name].shape[0], "part[10:20] of a part of the model's file: "
    try:
        with ckpt.reader() as files:
            found = answer(files[name], count // 3, (count // 2, *ckpt.tensors[name].shape[1:]))[10:20]
            read, whole = files.bytes_read, files[name][:]
    except Exception as error:  # of the learner's code
        raise NotYet(f"{head}{in_words(error)}") from error
    wrong = differs(found, whole[count // 3 + 10:count // 3 + 20], 0) or differs(
        Most(read, 1.01), Most(found.nbytes, 1.01), 0, what="the bytes that it reads are")
    if wrong:
        raise NotYet(f"{head}{wrong}")


def my_load(ckpt, plan, rank):
    here, d, kept = plan.ranks[rank], plan.head_dim, {}
    q, kv = (slice(heads.start * d, heads.stop * d) for heads in (here.q_heads, here.kv_heads))
    mlp, vocab = slice(here.mlp.start, here.mlp.stop), slice(here.vocab.start, here.vocab.stop)
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": mlp, "up_proj": mlp,
            "embed_tokens": vocab, "lm_head": vocab}
    columns = {"o_proj": q, "down_proj": mlp}
    with ckpt.reader() as files:
        for name in ckpt.tensors:
            layer, kind = name.split(".")[-2:]
            if layer in rows:
                kept[name] = files[name][rows[layer]]
            elif layer in columns and kind == "weight":
                kept[name] = files[name][:, columns[layer]]
            else:
                kept[name] = files[name][:]
    return kept


def in_float64(config, seed: int) -> dict[str, torch.Tensor]:
    return {name: one.double() for name, one in random_tensors(config, seed).items()}


def models():
    for (heads, kv_heads), size in (((9, 3), 2), ((8, 2), 3)):
        for number in reversed(range(size)):  # the last one first: its part is where it is by all that come before
            yield Example(heads, kv_heads, size, number, says=f"{heads} query and {kv_heads} KV heads, rank "
                f"{number} of {size}")


def loaded(answer, heads, kv_heads, size, number):
    fill = random_tensors if size == 2 else in_float64
    ckpt = CountedCheckpoint(toy_model(heads, kv_heads, 2, True, model_type="qwen3", fill=fill))
    yield from kept_of(answer, ckpt, ShardPlan.from_config(ckpt.config, size), number)


def kept_of(answer, ckpt, plan, number):
    """What a rank keeps of each tensor, and how many bytes it has read of it."""
    kept = answer(ckpt, plan, number)
    taken = dict(ckpt.taken)
    if not isinstance(kept, dict):
        yield "it returns", kept, "a dictionary from names to tensors"
    yield "the names are", sorted(kept), sorted(ckpt.tensors)
    for name in ckpt.tensors:
        yield f"{name} is", kept[name]
    for name in ckpt.tensors:
        yield f"the bytes that are read of {name} are", Most(taken.get(name, 0), 1.01)


def load_patch(answer) -> list[Patch]:
    """The engine's weights, loaded by a learner's function."""
    def load_model(ckpt, plan, dtype=torch.float32):
        parts = tensor_parts(ckpt.config, ckpt.tensors)
        if any(part.tensor != name for name, part in parts.items()):  # fused on disk: not what it was written for
            return original(LOAD)(ckpt, plan, dtype)
        model, kept = TensorParallelCausalLM(ckpt.config, plan, dtype), answer(ckpt, plan, rank())
        for path, own in by_parameter(parts).items():
            model.get_parameter(path).data.copy_(torch.cat([kept[name] for name in own]))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model.load_stats = SimpleNamespace(bytes_read=size, parameter_bytes=size)
        return model.eval()

    return [Patch("tplab.engine.runner.load_model", load_model)]


def on_the_ranks(setting, answer):
    ckpt, size = setting.checkpoint, setting.tensor_parallel_size
    if any(".qkv_proj." in name or ".gate_up_proj." in name for name in ckpt.tensors):
        return "this checkpoint has fused tensors, so only the small model was read"
    try:
        wrong = shared_pool(size).run(load_on_rank, answer, ckpt, ShardPlan.from_config(ckpt.config, size))
    except RankError as error:
        raise NotYet(f"in {ckpt.name}: {in_words(error)}") from error
    if any(wrong):
        raise NotYet(f"in {ckpt.name}, {next(filter(None, wrong))}")


def load_on_rank(answer, ckpt, plan: ShardPlan) -> str:
    """On a rank: what is wrong in what the answer keeps of a model."""
    ours, right = (kept_of(one, CountedCheckpoint(ckpt), plan, rank()) for one in (answer, my_load))
    return next((f"on rank {rank()}, {said}" for (what, value, *_), (_, must, *_) in zip(ours, right)
                 if (said := differs(value, must, 0, what=what))), "")


def my_spread(x):
    versions = all_gather(x[None], dim=0)        # [ranks, *x.shape]
    return (versions.amax(0) - versions.amin(0)).max().item()


def versions():
    equal, low, high = (torch.tensor([[4.0, -9.0], other]) for other in ([2.0, 0.5], [0.25, 2.0], [2.5, -2.1]))
    for some, says in (
            ([equal, low], "two ranks, which differ at two places, in both directions"),
            ([equal, equal], "two ranks, which hold the same"), ([0 * low, low], "two ranks, of which rank 0 holds "
                "zeros"),
            ([equal, equal, low], "three ranks, of which only rank 2 differs"),
            ([equal, low, high], "three ranks, rank 1 below rank 0 and rank 2 above"),
            ([low, equal, high], "three ranks, rank 0 below rank 1 and rank 2 above")):
        yield Example(*some, ranks=len(some), says=says)


def own_version(answer, *each):
    yield "it returns", one_number(answer(each[rank()]))


_SPREAD = "(versions.amax(0) - versions.amin(0)).max().item()"
EXERCISES = [
    Exercise("07", MyRows, parts, {
        "rows are counted from the source's beginning; the part begins at start":
            "self.source[self.start + first:self.start + last] -> self.source[first:last]",
        "the rows are right, and more than these are read: slice the source itself":
            "self.source[self.start + first:self.start + last] -> self.source[:][self.start + first:self.start + last]",
    }, "a slice of a slice reads its own rows and no others, from the model's file too", sliced, engine=of_a_file,
        within=0),
    Exercise("07", my_load, models, {
        "every rank keeps rank 0's part: where does this one's begin?": "plan.ranks[rank] -> plan.ranks[0]",
        "everything is read, and then cut: slice the file's tensor itself":
            "files[name][rows[layer]] -> files[name][:][rows[layer]]",
        "columns are read whole, and then cut": "files[name][:, columns[layer]] -> files[name][:][:, columns[layer]]",
        "heads are taken for rows; each has head_dim of them":
            "heads.start * d, heads.stop * d -> heads.start, heads.stop",
        "o_proj and down_proj are cut along dim 0; their inputs are what the rank has":
            "files[name][:, columns[layer]] -> files[name][columns[layer]]",
        "the vocabulary is kept whole, or all of it": (
            "if layer in rows: -> if False: ;; elif layer in columns -> elif False",
            '"embed_tokens": vocab, "lm_head": vocab -> "-": vocab'),
    }, "0 tensors differ, and on {ranks} every byte read is kept", loaded, load_patch, on_the_ranks, within=0,
             place="loads the weights", alone=ALONE),
    Exercise("07", my_spread, versions, {
        "this is how far the numbers of one rank are apart; two ranks are to be compared": (
            f"versions = all_gather(x[None], dim=0) -> versions = x ;; {_SPREAD} -> (x.max() - x.min()).item()",
            f"{_SPREAD} -> (x.max() - x.min()).item()"),
        "differences are taken in one direction only": f"{_SPREAD} -> (versions - versions[0]).max().item()",
        "every rank is compared with rank 0; two others can be further apart":
            f"{_SPREAD} -> (versions - versions[0]).abs()."
                                                                               "max().item()",
        "numbers of different places are compared": f"{_SPREAD} -> (versions.max() - versions.min()).item()",
        "the largest numbers of the ranks are compared, and not those of each place":
            f"{_SPREAD} -> (lambda m: m.max() - m.min())(versions.flatten(1).amax(1)).item()",
        "differences are added up, and the largest is asked for": "amin(0)).max() -> amin(0)).sum()",
        "the mean of the differences is taken, and the largest is asked for": "amin(0)).max() -> amin(0)).mean()",
        "rows of the same rank are compared, too: where is the dimension of the ranks?":
            "all_gather(x[None], dim=0) -> all_gather(x, dim=0)",
    }, "every rank knows the largest difference between any two", own_version, within=1e-5, alone=ALONE, counted=False,
             engine=lambda setting, answer: None)]
