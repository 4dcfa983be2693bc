"""The engine of notebook 09, and its cures as they stand in that notebook: ``{dotted name in patient_zero: cure}``."""

import ast
import re
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from helpers.notebooks import read, solution_code, tagged

from course import lesson
from course.lab.batch import FOLDER
from tplab.record import record

sys.path.insert(0, str(FOLDER))

import patient_zero  # noqa: E402
from patient_zero import attention, linear, weight_loader  # noqa: E402, F401, the cures'


def _cures(notebook):
    """Every definition in the cells that cure, made here: ranks import this file and find them by name."""
    sources = [cell.source for cell in tagged(notebook, "cure")] + [*map(solution_code, tagged(notebook, "solution"))]
    wanted = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    for source in sources:
        body = [node for node in ast.parse(source).body if isinstance(node, wanted)]
        exec(compile(ast.Module(body, []), "notebook 09", "exec"), globals())
    names = dict.fromkeys(name for cell in notebook.cells for name in re.findall(r'cures\["([\w.]+)"\] =', cell.source))
    return {name: globals()[name.rpartition(".")[2]] for name in names}


CURES = _cures(read(FOLDER / "09_your_own_engine.ipynb"))


def rest_to_the_last(total):
    """A share that is right, and not the plan's: the last rank takes the remainder."""
    size, rest = divmod(total, linear.tp_size())
    rank = linear.tp_rank()
    return rank * size, size + rest * (rank == linear.tp_size() - 1)


def turned_along_heads(rotary_emb, position_ids, q, k):
    """A rotation that fails behind the module that makes its tables."""
    return attention.apply_rotary_pos_emb(q, k, *rotary_emb(q, position_ids), 2)


def examine(folder, input_ids, cures):
    """On a rank: load the engine under ``cures``, write twelve tokens, and tell everything that a symptom shows in."""
    return lesson.with_cures(cures, _examine, folder, input_ids)


def record_run(folder, input_ids, cures, out):
    """On a rank: load the engine under ``cures`` and record it while it writes three tokens."""
    def write():
        engine = patient_zero.load(folder)
        with record(out, rank=dist.get_rank(), world_size=dist.get_world_size()) as recording:
            recording.watch(engine)
            engine.generate(input_ids, 3)

    lesson.with_cures(cures, write)


def gradients(folder, input_ids):
    """On a rank: call the engine outside of inference mode; ``{parameter: whether it has a gradient}``."""
    engine = patient_zero.load(folder)
    engine(torch.tensor([input_ids]))[0].sum().backward()
    return {name: param.grad is not None for name, param in engine.named_parameters()}


def _examine(folder, input_ids):
    engine = patient_zero.load(folder)
    seen = SimpleNamespace(self_test=_text_of(engine.self_test, input_ids),
                           heads=engine.layers[0].self_attn.qkv_proj.num_heads)
    hooks = [engine.norm.register_forward_hook(lambda module, args, out: vars(seen).update(hidden=out)),
             engine.layers[0].self_attn.attn.register_forward_hook(
                 lambda module, args, out: vars(seen).update(attention=out[0][0]))]
    with torch.inference_mode():
        logits, caches = engine(torch.tensor([input_ids]))
    for hook in hooks:
        hook.remove()
    seen.logits, seen.head, seen.tokens = logits[0], engine.lm_head.weight.detach(), []
    seen.cache_bytes = _bytes(tensor for cache in caches for tensor in cache)
    engine.register_forward_pre_hook(lambda module, args: seen.tokens.append(args[0].shape[1]))
    seen.text = _text_of(engine.generate, input_ids, 12)
    seen.parameter_bytes = _bytes(engine.parameters())
    seen.kept_bytes = _bytes(getattr(engine, "state_dict_on_rank", {}).values())
    return seen


def _text_of(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _bytes(tensors):
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
