"""Notebook 07: a loader that reads what is kept, and a disagreement that no rank sees alone."""

from types import SimpleNamespace

import torch

from course.judge.exercise import Example, Exercise, Most
from course.judge.toy_checkpoint import CountedCheckpoint, toy_model
from course.judge.work import one_number
from course.random_weights import random_tensors
from tplab.checkpoint.layout import by_parameter, tensor_parts
from tplab.model.decoder import TensorParallelCausalLM
from tplab.patch import Patch, original
from tplab.ranks import all_gather, rank
from tplab.shard import ShardPlan

ALONE = "one rank keeps everything, so it was judged on examples with 2 and 3"
LOAD = "tplab.model.loader.load_model"
CUT = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head", "o_proj", "down_proj"}


def my_load(ckpt, plan, rank):
    shard, d, kept = plan.ranks[rank], plan.head_dim, {}
    q, kv = (slice(heads.start * d, heads.stop * d) for heads in (shard.q_heads, shard.kv_heads))
    mlp, vocab = slice(shard.mlp.start, shard.mlp.stop), slice(shard.vocab.start, shard.vocab.stop)
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
    return {name: tensor.double() for name, tensor in random_tensors(config, seed).items()}


def models():
    for (heads, kv_heads), size in (((9, 3), 2), ((8, 2), 3)):
        for number in reversed(range(size)):  # the last one first: its part is where it is by all that come before
            yield Example(heads, kv_heads, size, number,
                          says=f"{heads} query and {kv_heads} KV heads, rank {number} of {size}")


def loaded(answer, heads, kv_heads, size, number):
    """What a rank keeps of each tensor, and how many bytes it has read of it."""
    fill = random_tensors if size == 2 else in_float64
    ckpt = CountedCheckpoint(toy_model(heads, kv_heads, 2, True, model_type="qwen3", fill=fill))
    kept = answer(ckpt, ShardPlan.from_config(ckpt.config, size), number)
    taken = dict(ckpt.taken)
    if not isinstance(kept, dict):
        yield "it returns", kept, "a dictionary from names to tensors"
    yield "the names are", sorted(kept), sorted(ckpt.tensors)
    whole = {name.split(".")[-2] for name, info in ckpt.tensors.items() if name.endswith(".weight")
             and getattr(kept[name], "shape", None) == torch.Size(info.shape)}
    yield "the weights that are not cut are", ", ".join(sorted(whole & CUT)).replace("_proj", "") or "none"
    names = sorted(ckpt.tensors, key=lambda name: "layers" not in name)  # the embedding and the head last
    for name in names:
        yield f"{name} is", kept[name]
    for name in names:
        yield f"the bytes that are read of {name} are", Most(taken.get(name, 0), 1.01)


def load_patch(answer) -> list[Patch]:
    """The engine's weights, loaded by a learner's function."""
    def load_model(ckpt, plan, dtype=torch.float32):
        parts = tensor_parts(ckpt.config, ckpt.tensors)
        if any(part.tensor != name for name, part in parts.items()):  # fused on disk: not what it was written for
            return original(LOAD)(ckpt, plan, dtype)
        model, kept = TensorParallelCausalLM(ckpt.config, plan, dtype), answer(ckpt, plan, rank())
        for path, names in by_parameter(parts).items():
            model.get_parameter(path).data.copy_(torch.cat([kept[name] for name in names]))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model.load_stats = SimpleNamespace(bytes_read=size, parameter_bytes=size)
        return model.eval()

    return [Patch("tplab.engine.runner.load_model", load_model)]


def in_the_engine(setting, answer):
    setting.align(decode=True, prompts=[setting.ids(12)])  # the last eight are decoded


def my_spread(x):
    versions = all_gather(x[None], dim=0)        # [ranks, *x.shape]
    return (versions.amax(0) - versions.amin(0)).max().item()


def versions():
    equal, low, high = (torch.tensor([[4.0, -9.0], other]) for other in ([2.0, 0.5], [0.25, 2.0], [12.5, -2.25]))
    for some in ([equal, low], [low, equal], [equal, equal], [equal, equal, low], [equal, low, high],
                 [low, equal, high], [equal, high, low]):
        yield Example(*some, ranks=len(some), says="; ".join(f"x of rank {r} {x.tolist()}" for r, x in enumerate(some)))


def own_version(answer, *x):
    yield "it returns", one_number(answer(x[rank()]))


_SPREAD = "(versions.amax(0) - versions.amin(0)).max().item()"
EXERCISES = [
    Exercise("07", my_load, models, {
        "every rank keeps rank 0's part; take that of plan.ranks[rank]": "plan.ranks[rank] -> plan.ranks[0]",
        "everything is read, and then cut: slice the file's tensor itself":
            "files[name][rows[layer]] -> files[name][:][rows[layer]]",
        "heads are counted where rows are kept: a head has head_dim rows":
            "slice(heads.start * d, heads.stop * d) -> slice(heads.start, heads.stop)",
        "the KV heads are those of shard.kv_heads, which rank * kv_heads // ranks does not give": (
            "(shard.q_heads, shard.kv_heads)) -> (shard.q_heads, range(rank * plan.num_kv_heads // len(plan.ranks), "
            "(rank + 1) * plan.num_kv_heads // len(plan.ranks))))"),
        "the biases of q, k and v belong to their rows, and are cut, too":
            "if layer in rows: -> if layer in rows and kind == \"weight\":",
        "nothing is cut": "if layer in rows: -> if False: ;; elif layer in columns -> elif False",
        "the weights of o_proj and down_proj are cut along dim 1":
            ("files[name][:, columns[layer]] -> files[name][columns[layer]]", *(
                f'files[name][:, columns[layer]] -> files[name][columns[layer] if layer == "{cut}" else (slice(None), '
                'columns[layer])]' for cut in ("o_proj", "down_proj"))),
        "shares are not equally large: take the bounds from the plan": (
            "shard.mlp.start, shard.mlp.stop -> *(plan.ranks[-1].mlp.stop // len(plan.ranks) * r for r in "
            "(rank, rank + 1))",
            "shard.vocab.start, shard.vocab.stop -> *(plan.ranks[-1].vocab.stop // len(plan.ranks) * r for r in "
            "(rank, rank + 1))"),
        "a bias of o_proj belongs to the sum, and is not cut": "else:\n                kept[name] = files[name][:] -> "
            "else:\n                kept[name] = files[name][columns[layer]] if layer in columns else files[name][:]",
        "the embedding and the head are not cut": '"embed_tokens": vocab, "lm_head": vocab} -> }',
    }, "0 tensors differ, and every byte read is kept; on {ranks}, every trace point agrees with Hugging Face", loaded,
             load_patch, in_the_engine, within=0, place="loads the weights",
             alone=ALONE),
    Exercise("07", my_spread, versions, {
        "this is how far the numbers of one rank are apart; two ranks are to be compared":
            f"{_SPREAD} -> (x.max() - x.min()).item()",
        "the largest and the smallest of all numbers are compared: compare each place by itself":
            f"{_SPREAD} -> (versions.max() - versions.min()).item()",
        "without a new dimension, numbers of one rank are compared with each other":
            "all_gather(x[None], dim=0) -> all_gather(x, dim=0)",
        "only the largest numbers of the ranks are compared: compare each place by itself":
            f"{_SPREAD} -> (versions.flatten(1).amax(1).max() - versions.flatten(1).amax(1).min()).item()",
        "each rank compares itself with the others, so the ranks return different numbers":
            f"{_SPREAD} -> (versions - x).abs().max().item()",
        "differences are taken in one direction only": (
            f"{_SPREAD} -> (versions - versions[0]).max().item()",
            *(f"{_SPREAD} -> (versions[{a}] - versions[{b}]).max().item()" for a, b in (
                (0, -1), (-1, 0), (0, 1), (1, 0)))),
        "only two of the ranks are compared": tuple(
            f"{_SPREAD} -> (versions[{other}] - versions[0]).abs().max().item()" for other in (1, -1)),
        "each rank is compared with the next one only; two others can be further apart":
            f"{_SPREAD} -> versions.diff(dim=0).abs().max().item()",
        "every rank is compared with rank 0; two others can be further apart":
            f"{_SPREAD} -> (versions - versions[0]).abs().max().item()",
    }, "every rank returns the largest difference between any two", own_version, within=1e-5, alone=ALONE,
             counted=False, engine=lambda setting, answer: None)]
