"""What the tests of faults and of the diagnosis share: checkpoints in which every fault can show, and prompts."""

from itertools import islice

from helpers.checkpoints import make_checkpoint, shapes

from tplab import patch
from tplab.align.floors import RELATIVE
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault
from tplab.faults.scenarios import plain_prompts as prompts  # noqa: F401  (what tests call it)

# model → number of ranks: partition, uneven heads, replication; biases, q/k norms, scaled RoPE, untied heads.
CASES = {
    "fable": 2,
    "smollm2's heads": 2,
    "qwen0.5b's heads": 3,
    "llama with biases and yarn": 2,
    "qwen3, replicated": 4,
    "mistral, untied": 2,
}


def case_checkpoint(name, folder):
    """Open ``fable``, or write the named random checkpoint below ``folder``."""
    if name == "fable":
        return open_checkpoint("fable")
    layouts = shapes()
    options = {
        "smollm2's heads": layouts["SmolLM2-135M-Instruct"],
        "qwen0.5b's heads": layouts["Qwen2.5-0.5B-Instruct"],
        "llama with biases and yarn": {"model_type": "llama", "heads": 6, "kv_heads": 3, "head_dim": 10, "hidden": 30,
                                       "inter": 43, "vocab": 67, "rope": "yarn", "attention_bias": True,
                                       "mlp_bias": True},
        "qwen3, replicated": {"model_type": "qwen3", "heads": 8, "kv_heads": 2, "head_dim": 12, "vocab": 71},
        "mistral, untied": {"model_type": "mistral", "heads": 6, "kv_heads": 2, "vocab": 81},
    }[name]
    return open_checkpoint(make_checkpoint(folder / "m", **options, seed=4))


def models_where(name, at, folder, cases=CASES, count=1):
    """``[(checkpoint, ranks), …]``: the first ``count`` models in which a fault can show, from model ``at`` on."""
    order = [*cases][at % len(cases):] + [*cases][:at % len(cases)]
    opened = ((case_checkpoint(case, folder / str(n)), CASES[case]) for n, case in enumerate(order))
    return [*islice((one for one in opened if fault(name).applies_to(one[0].config, one[1])), count)]


def over_floor(report):
    """How many times the floor the first divergence is; infinite for NaN."""
    point = report.first_divergence
    if point.nan or point.inf:
        return float("inf")
    scale = report.evidence[point.name].reference.abs().max().item()
    return max(point.relative, point.spread / scale) / RELATIVE[report.dtype]


def nothing_is_patched():
    """Whether the engine of this process is clean."""
    return not patch._originals
