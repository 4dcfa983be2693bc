"""The score of the diagnosis: every fault of the museum, on models of several head layouts.

    python -m course score                                   fable and four random checkpoints, 2 and 3 ranks
    python -m course score smollm2 --tp 2 --dtype float32    one model
"""

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from course.random_weights import fp8_tensors, write_random
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checks import quoted
from tplab.errors import TplabError
from tplab.faults.fault import Fault
from tplab.faults.museum import MUSEUM, WING
from tplab.faults.scenarios import plain_prompts, scenario
from tplab.model.dtypes import parse_dtype
from tplab.pool import available_cores

# Head layouts that differ from fable's 8/2: uneven, 7 to a group, q and k norms, one KV head per query head; all RoPE
# scalings that change something at these lengths, tied and untied heads, biases.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_SMALL = {"num_hidden_layers": 3, "intermediate_size": 61, "vocab_size": 211, "max_position_embeddings": 256,
          "rms_norm_eps": 1e-6}
_SIX = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "eos_token_id": 2,
        "bos_token_id": None, "pad_token_id": None, "rope_parameters": _PLAIN}
_EXPERTS = {"num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 13}
LAYOUTS = {
    "llama 9/3": {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10,
                  "hidden_size": 45, "tie_word_embeddings": True, "rope_parameters": _YARN, "attention_bias": True,
                  "mlp_bias": True},
    "qwen2 14/2": {"model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8,
                   "hidden_size": 56, "tie_word_embeddings": True, "rope_parameters": _PLAIN},
    "qwen3 8/4": {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12,
                  "hidden_size": 40, "tie_word_embeddings": False, "rope_parameters": _LINEAR, "attention_bias": True},
    # Each of the museum's wing shows on one of these.
    "gpt-oss 6/3": _SIX | {"model_type": "gpt_oss", "head_dim": 10, "num_local_experts": 9, "num_experts_per_tok": 2,
                           "sliding_window": 6},
    "gemma2 6/3": _SIX | {"model_type": "gemma2", "head_dim": 10, "query_pre_attn_scalar": 17, "sliding_window": 6,
                          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "olmo2 6/3": _SIX | {"model_type": "olmo2", "tie_word_embeddings": False},
    "smollm3 6/3": _SIX | {"model_type": "smollm3", "head_dim": 10, "no_rope_layers": [1, 0, 1]},
    "glm4 6/3": _SIX | {"model_type": "glm4", "head_dim": 10, "rope_parameters": _PLAIN | {
        "partial_rotary_factor": 0.6}},
    "qwen2-moe 6/3": _SIX | _EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 17},
    "qwen3-moe 6/3": _SIX | _EXPERTS | {"model_type": "qwen3_moe", "head_dim": 10, "norm_topk_prob": True},
    "llama 6/3 in fp8": _SIX | {"model_type": "llama", "head_dim": 10, "fill": fp8_tensors, "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [7, 16], "activation_scheme": "dynamic"}},
    "mistral 6/6": {"model_type": "mistral", "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8,
                    "hidden_size": 48, "tie_word_embeddings": False, "rope_parameters": _PLAIN, "sliding_window": None},
}
EXACT, LOOKALIKE, WRONG, UNNAMED, UNSEEN = "exact", "lookalike", "wrong", "unnamed", "unseen"
HEALTHY, FALSE_ALARM = "healthy", "false alarm"


@dataclass(frozen=True)
class Run:
    """One engine, broken by one fault or healthy, and what the diagnosis said."""

    model: str
    tensor_parallel_size: int
    dtype: str
    fault: str | None
    names: tuple[str, ...]  # the names, of each diagnosis the first; "?" for one without a name
    outcome: str


@dataclass(frozen=True)
class Score:
    """All runs of a score."""

    runs: tuple[Run, ...]

    @property
    def ok(self) -> bool:
        """Nothing named wrongly, unseen or unnamed, and no false alarm."""
        return {run.outcome for run in self.runs} <= {EXACT, LOOKALIKE, HEALTHY}

    def counts(self, dtype: str) -> Counter:
        """How often each outcome was met in a dtype."""
        return Counter(run.outcome for run in self.runs if run.dtype == dtype)

    def __str__(self) -> str:
        lines = []
        for dtype in dict.fromkeys(run.dtype for run in self.runs):
            counts = self.counts(dtype)
            broken = sum(counts[outcome] for outcome in (EXACT, LOOKALIKE, WRONG, UNNAMED, UNSEEN))
            lines.append(f"{dtype}: {broken} broken engines: {counts[EXACT]} named exactly, {counts[LOOKALIKE]} among "
                         f"lookalikes, {counts[WRONG]} wrongly, {counts[UNNAMED]} without a name, {counts[UNSEEN]} "
                         f"unseen; {counts[HEALTHY] + counts[FALSE_ALARM]} healthy ones: {counts[FALSE_ALARM]} false "
                         "alarms")
        for run in self.runs:
            if run.outcome in (WRONG, UNNAMED, UNSEEN, FALSE_ALARM):
                lines.append(f"  {run.outcome}: {run.fault or 'healthy'} on {run.model}, tp {run.tensor_parallel_size},"
                             f" {run.dtype}" + (f": said {', '.join(run.names)}" if run.names else ""))
        return "\n".join(lines)


def score(models: Sequence[str | os.PathLike] = (), tensor_parallel_sizes: Sequence[int] = (2, 3),
          dtypes: Sequence[str] = ("float32", "bfloat16"), workers: int = 1, log=lambda line: None) -> Score:
    """Break the engine with every fault that can show, on every model, number of ranks and dtype; diagnose each.

    ``models``: names or folders; fable and four random checkpoints of other head layouts if none is given. The ranks
    are logical, ``workers`` processes share the work. ``log``: called with a line for every model, size and dtype.
    """
    with tempfile.TemporaryDirectory(prefix="tplab-score-") as folder:
        named = {os.fspath(model): model for model in models} or {"fable": "fable", **{
            name: write_random(Path(folder, f"model-{seed}"), seed, **_SMALL, **config)
            for seed, (name, config) in enumerate(LAYOUTS.items(), 4)}}  # 0 to 3: `head_random` draws with those
        jobs = [(name, model, size, dtype) for name, model in named.items() for size in tensor_parallel_sizes
                if size <= open_checkpoint(model).config.num_heads for dtype in dtypes]
        runs = []
        with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            try:
                for (name, _, size, dtype), fault_runs in zip(jobs, pool.map(_runs, jobs)):
                    log(f"{name}, tp {size}, {dtype}: {len(fault_runs) - 1} faults")
                    runs += fault_runs
            finally:
                pool.shutdown(cancel_futures=True)  # after an interrupt, not all jobs are done before it ends
    return Score(tuple(runs))


def _runs(job: tuple) -> list[Run]:
    name, model, size, dtype = job
    ckpt = open_checkpoint(model)
    has_traits = ckpt.config.traits or ckpt.config.scale_block  # such a model is for faults that show on no other
    asked = map(MUSEUM.get, WING) if has_traits else MUSEUM.values()
    able = [fault for fault in asked if not fault.why_not(ckpt.config, size)
            and not (dtype == "bfloat16" and fault.below_bfloat16)]
    return [_run(name, ckpt, size, dtype, fault) for fault in (None, *able)]


def _run(model: str, ckpt: Checkpoint, size: int, dtype: str, fault: Fault | None) -> Run:
    from tplab.align import align, align_decode, diagnose

    options = {"tensor_parallel_size": size, "dtype": dtype, "patches": [fault] if fault else [], "logical": True}
    run, prompts = align, plain_prompts(ckpt.config.vocab_size)
    if fault:
        options |= fault.options
        if fault.shows_in == "decode":
            options |= scenario(fault.name, ckpt.config.vocab_size)
            run, prompts = align_decode, options.pop("prompts")
    try:
        report = run(ckpt, prompts, **options)
        diagnoses = [diagnosis for diagnosis in report.diagnoses or [diagnose(report)] if not diagnosis.ok]
    except TplabError as error:
        diagnoses = [diagnose(error)]
    names = tuple(diagnosis.fault or "?" for diagnosis in diagnoses)
    return Run(model, size, dtype, fault and fault.name, names, _outcome(fault, diagnoses))


def _outcome(fault: Fault | None, diagnoses) -> str:
    """``diagnoses`` must name the fault and nothing else: with another name beside the true one, it is wrong."""
    if fault is None:
        return FALSE_ALARM if diagnoses else HEALTHY
    if not diagnoses:
        return UNSEEN
    if any(diagnosis.fault and fault.name not in diagnosis.names for diagnosis in diagnoses):
        return WRONG
    named = [diagnosis.fault for diagnosis in diagnoses if fault.name in diagnosis.names]
    return UNNAMED if not named else EXACT if fault.name in named else LOOKALIKE


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="the models to break (those of the museum)")
    parser.add_argument("--tp", default="2,3", metavar="N,N", help="numbers of ranks (2,3)")
    parser.add_argument("--dtype", default="float32,bfloat16", metavar="D,D", help="dtypes (float32,bfloat16)")


def main(chosen: argparse.Namespace) -> int:
    """Run it; exit code 1 if a fault was named wrongly, not named or not seen, or a healthy engine blamed."""
    sizes = _listed(chosen.tp)
    if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
        raise TplabError(f"--tp takes numbers of ranks from 1 up, such as 2,3, not {quoted(chosen.tp)}")
    dtypes = _listed(chosen.dtype)
    for dtype in dtypes:
        parse_dtype(dtype)
    result = score(chosen.models, [int(size) for size in sizes], dtypes, available_cores(),
                   lambda line: print(line, flush=True))
    print(result)
    return 0 if result.ok else 1


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
