"""A text by a model all of whose layers are of a learner's class: what ``MyLayer`` of notebook 06 is built for."""

from collections.abc import Callable

import torch

from tplab.checkpoint import Checkpoint
from tplab.lesson.limit import works
from tplab.lesson.mine import on_ranks
from tplab.model import NoCache, load_model
from tplab.pool import shared_pool
from tplab.ranks import all_gather, rank
from tplab.shard import ShardPlan


def layer_fits(ckpt: Checkpoint) -> bool:
    """Whether the model's layers are made of what ``MyLayer`` is given."""
    names = {name.split(".", 3)[3] for name in ckpt.tensors if name.startswith("model.layers.0.")}
    return not ckpt.config.qk_norm and {"self_attn.q_proj.weight", "mlp.gate_proj.weight"} <= names


@works
def written(layer_class: Callable | None, ckpt: Checkpoint, ids: list[int], count: int, *, tensor_parallel_size: int = 2
            ) -> list[int]:
    """``count`` greedy tokens behind ``ids``, by a model whose layers are all of a learner's class; the lab's own where
    there is none.

        >>> new = lesson.written(MyLayer, ckpt, ids, 40, tensor_parallel_size=2)
    """
    if layer_class is None or not layer_fits(ckpt):
        from tplab import LLM, SamplingParams

        with LLM(ckpt, tensor_parallel_size) as llm:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            return list(llm.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids)
    plan = ShardPlan.from_config(ckpt.config, tensor_parallel_size)
    (found, _), *_ = on_ranks(shared_pool(tensor_parallel_size), _write, layer_class, ckpt, plan, ids, count)
    return found


def _write(layer_class: Callable, ckpt: Checkpoint, plan: ShardPlan, ids: list[int], count: int) -> list[int]:
    """On a rank: the lab's two ends, and between them the learner's layers."""
    with torch.inference_mode(), ckpt.reader() as files:
        model, layers, here = load_model(ckpt, plan), [], plan.ranks[rank()]
        for number in range(ckpt.config.num_layers):
            at = f"model.layers.{number}."
            weights = {name.removeprefix(at): files[name] for name in ckpt.tensors if name.startswith(at)}
            layers.append(layer_class(weights, here, ckpt.config))
        new, known, words = list(ids), [], [len(shard.vocab) for shard in plan.ranks]
        while len(known) < len(ids) + count:
            positions = torch.arange(len(known), len(known) + len(new))
            hidden = model.embed_tokens(torch.tensor(new))
            cos, sin = (table[0] for table in model.rotary(hidden, positions, NoCache([len(new)]).lengths))
            for layer in layers:
                hidden = layer(hidden, cos, sin, lambda name, value: value)
            known += new
            logits = all_gather(model.compute_logits(model.norm(hidden[-1:])), dim=-1, sizes=words)
            new = [int(logits.argmax())]
    return (known + new)[len(ids):][:count]
