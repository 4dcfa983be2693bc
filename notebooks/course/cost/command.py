"""``python -m course bench``: a race, or with ``predict`` what the cost model says of a model on more ranks."""

import argparse
import sys

from tplab.errors import TplabError


def add_options(parser: argparse.ArgumentParser, models: str) -> None:
    """``models``: the models' names, for the help."""
    parser.add_argument("kind", nargs="?", default="decode", metavar="KIND",
                        help="decode, prefill or batch: beside Hugging Face; predict: tokens/s here and on "
                             "accelerators, from the sizes (decode)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="smollm2", metavar="MODEL",
                       help=f"{models}; for predict also qwen2.5-0.5b, mistral-7b or llama-3.1-70b (smollm2)")
    which.add_argument("--config", metavar="FILE", help="for predict: the config.json of a published model")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="5 or more (5)")
    parser.add_argument("--dtype", default="float32", help="float32, float64 or bfloat16 (float32)")
    parser.add_argument("--vllm", metavar="PYTHON", help="race against vLLM too: the Python of its own environment")


def main(chosen: argparse.Namespace) -> int:
    """Measure and show."""
    if chosen.kind == "predict":
        return _predict(chosen)
    if chosen.config is not None:
        raise TplabError(f"--config is for predict; {chosen.kind} needs the weights of a --model")
    from course.cost.race import race

    race(chosen.kind, chosen.model, chosen.tp, rounds=chosen.rounds, dtype=chosen.dtype, vllm=chosen.vllm)
    return 0


def _predict(chosen: argparse.Namespace) -> int:
    from course.cost.outlook import speed_lines
    from course.cost.shapes import SHAPES, shape_config
    from tplab.checkpoint import open_checkpoint
    from tplab.memory import config_file
    from tplab.model.dtypes import parse_dtype
    from tplab.shard import ShardPlan

    dtype = parse_dtype(chosen.dtype)
    if chosen.config is not None:
        config, _ = config_file(chosen.config, dtype)
    else:
        config = shape_config(chosen.model) if chosen.model in SHAPES else open_checkpoint(chosen.model).config
    print("measuring this machine, up to a minute …", file=sys.stderr, flush=True)
    for line in speed_lines(config, ShardPlan.from_config(config, chosen.tp), dtype):
        print(line)
    return 0
