"""``python -m course bench``: its options, and what it writes."""

import argparse
import json
import sys

from tplab.errors import TplabError
from tplab.files import check_writable, write_file


class BenchCommandError(TplabError):
    """Options of the benchmark that do not fit together."""


def add_options(parser: argparse.ArgumentParser, models: str) -> None:
    """``models``: the models' names, for the help."""
    parser.add_argument("kind", nargs="?", default="decode", metavar="KIND",
                        help="decode, prefill, batch, prefix, long, load, curves, or predict: tokens/s here and on "
                             "accelerators, from the sizes (decode)")
    parser.add_argument("--model", default="smollm2", metavar="MODEL",
                        help=f"{models}; random-qwen2.5-0.5b, that shape with random weights; for predict also "
                             "qwen2.5-0.5b, mistral-7b or llama-3.1-70b (smollm2)")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="5 or more (5)")
    parser.add_argument("--dtype", default="float32", help="float32, float64 or bfloat16 (float32)")
    parser.add_argument("--vllm", metavar="PYTHON", help="race against vLLM too: the Python of its own environment")
    parser.add_argument("--llama-cpp", metavar="PYTHON",
                        help="race against llama.cpp too: the Python of an environment with llama-cpp-python and gguf")
    parser.add_argument("--batch-invariant", action="store_true", help="race tplab with batch_invariant=True as well")
    parser.add_argument("--busy", action="store_true", help="beside a process that uses one core all the time")
    parser.add_argument("--picture", metavar="FILE.png", help="of curves: draw them")
    parser.add_argument("--json", metavar="FILE", help="write the table")


def main(chosen: argparse.Namespace) -> int:
    """Measure, show, write."""
    if chosen.picture is not None and chosen.kind != "curves":
        raise BenchCommandError(f"--picture draws curves; {chosen.kind} is a table")
    for path in (chosen.json, chosen.picture):
        if path is not None:
            check_writable(path)
    if chosen.kind == "predict":
        return _predict(chosen)
    from course.cost import bench

    found = bench(chosen.kind, chosen.model, chosen.tp, rounds=chosen.rounds, dtype=chosen.dtype, vllm=chosen.vllm,
                  llama_cpp=chosen.llama_cpp, batch_invariant=chosen.batch_invariant, busy=chosen.busy)
    if chosen.json is not None:
        write_file(chosen.json, lambda new: new.write_text(json.dumps(found, indent=1)))
    if chosen.picture is not None:
        from course.figures import curves_figure

        write_file(chosen.picture, lambda new: new.write_bytes(curves_figure(found).png()))
    return 0


def _predict(chosen) -> int:
    from course.cost.outlook import speed_lines
    from course.cost.shapes import SHAPES, shape_config
    from tplab.checkpoint import open_checkpoint
    from tplab.model.dtypes import parse_dtype
    from tplab.shard import ShardPlan

    config = shape_config(chosen.model) if chosen.model in SHAPES else open_checkpoint(chosen.model).config
    dtype = parse_dtype(chosen.dtype)
    print("measuring this machine, up to a minute …", file=sys.stderr, flush=True)
    print("\n".join(speed_lines(config, ShardPlan.from_config(config, chosen.tp), dtype)))
    return 0
