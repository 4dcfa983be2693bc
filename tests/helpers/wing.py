"""The museum's wing, fault by fault: ``python tests/helpers/wing.py [FAULT …]`` prints what ``align`` and ``check`` say
of each, in float32 and bfloat16, on 2 to 4 ranks, and of every model where nothing is wrong.
"""

import sys
import tempfile
from pathlib import Path

import torch

from course.random_weights import fp8_tensors, write_random
from tplab.align import align, align_decode, check
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.faults import MUSEUM, WING, scenario
from tplab.faults.fault import Fault
from tplab.faults.scenarios import plain_prompts

# A model of helpers.trait_models on which each shows.
SHOWN_ON = {
    "window_one_too_wide": "window on all layers", "window_wrong_layers": "window by layer",
    "window_from_chunk_start": "Gemma-3", "sinks_of_rank_0": "gpt-oss", "sinks_once_per_rank": "gpt-oss",
    "capped_after_mask": "Gemma-2", "logits_capped_twice": "capped scores and logits", "qk_norm_own_heads": "OLMoE",
    "norm_plus_one_forgotten": "Gemma-2", "embedding_unscaled": "weight + 1, embedding scaled",
    "rope_in_every_layer": "layers without rotation", "rope_whole_head": "GLM-4", "router_softmax_order": "OLMoE",
    "router_not_renormalised": "experts, renormalised", "router_low_precision": "Mixtral",
    "all_reduce_twice": "experts", "shared_expert_not_reduced": "shared expert",
    "experts_off_by_offset": "experts", "top_k_of_own_experts": "nine experts", "expert_bias_everywhere": "gpt-oss",
    "block_scales_of_other_rows": "fp8"}
FP8 = {"quant_method": "fp8", "weight_block_size": [7, 16], "activation_scheme": "dynamic"}


def model_of(name: str, folder: Path) -> Checkpoint:
    """A model by its name in :data:`SHOWN_ON`."""
    from helpers.trait_models import ODD, TRAITS, make_model

    if name == "fp8":
        return open_checkpoint(write_random(folder, 3, fill=fp8_tensors, model_type="llama", quantization_config=FP8,
                                            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **ODD))
    config = TRAITS["experts"] | {"num_experts": 9} if name == "nine experts" else TRAITS[name]
    return open_checkpoint(make_model(folder, **config))


def aligned(ckpt: Checkpoint, one: Fault | None, tp: int, dtype: str, **options):
    """What ``align`` reports of the lab's engine with a fault in it."""
    options |= {"tensor_parallel_size": tp, "dtype": dtype, "logical": True, "patches": [one] if one else []}
    options |= one.options if one else {}
    if one and one.shows_in == "decode":
        return align_decode(ckpt, **scenario(one.name, ckpt.config.vocab_size), **options)
    return align(ckpt, plain_prompts(ckpt.config.vocab_size), **options)


def checked(ckpt: Checkpoint, one: Fault | None, tp: int, dtype: str, folder: Path, **options):
    """What ``check`` reports of a recording of it, which has no trace point and was made token by token at the end."""
    from helpers.recorded import record_lab

    options |= one.options if one else {}
    return check(record_lab(folder, ckpt, plain_prompts(ckpt.config.vocab_size), tp, getattr(torch, dtype), decoded=2,
                            patches=[one] if one else [], **options), ckpt)


def named(report, one: Fault) -> bool:
    """Whether a report says this fault, and no other."""
    return bool(report.diagnoses) and all(one.name in found.names for found in report.diagnoses)


def main(names: list[str]) -> int:
    from helpers.trait_models import TRAITS
    from transformers.utils import logging

    logging.disable_progress_bar()
    runs = [(tp, dtype) for dtype in ("float32", "bfloat16") for tp in (2, 3, 4)]
    print(f"{'':28}", *(f"{dtype[:4]} tp {tp}".center(12) for tp, dtype in runs))
    good, alarms = True, []
    with tempfile.TemporaryDirectory() as folder:
        for one in map(MUSEUM.get, names or WING):
            ckpt, cells = model_of(SHOWN_ON[one.name], Path(folder, one.name)), []
            for tp, dtype in runs:
                if one.why_not(ckpt.config, tp) or dtype == "bfloat16" and one.below_bfloat16:
                    cells.append("–")
                    continue
                said = (aligned(ckpt, one, tp, dtype),
                        checked(ckpt, one, tp, dtype, Path(folder, f"{one.name} {tp} {dtype}")))
                marks = ["named" if named(report, one) else "MISSED" for report in said]
                good = good and "MISSED" not in marks
                cells.append(" ".join(marks))
            print(f"{one.name:28}", *(cell.center(12) for cell in cells), flush=True)
        for number, name in enumerate(() if names else TRAITS):
            ckpt = model_of(name, Path(folder, f"model {number}"))
            for tp, dtype in runs:
                for dealt_out in [False, True][:1 + (ckpt.config.experts is not None)]:
                    options = {"enable_expert_parallel": dealt_out}
                    path = Path(folder, f"{number} {tp} {dtype} {dealt_out}")
                    for report in (aligned(ckpt, None, tp, dtype, **options),
                                   checked(ckpt, None, tp, dtype, path, **options)):
                        alarms += [(name, tp, dtype)] if not report.ok or report.diagnoses else []
        print(f"healthy: {len(alarms)} false alarms", *alarms)
    return 0 if good and not alarms else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main(sys.argv[1:]))
