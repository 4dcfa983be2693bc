"""``python -m tplab bench``: its options, and what it writes."""

import argparse
import json

from tplab.errors import TplabError
from tplab.files import check_writable, write_file


class BenchCommandError(TplabError):
    """Options of the benchmark that do not fit together."""


def add_options(parser: argparse.ArgumentParser, models: str) -> None:
    """``models``: the models' names, for the help."""
    parser.add_argument("kind", nargs="?", default="decode", metavar="KIND",
                        help="decode, prefill, batch, prefix, long, load or curves (decode)")
    parser.add_argument("--model", default="smollm2", metavar="MODEL",
                        help=f"{models}; or random-qwen2.5-0.5b, that shape with random weights (smollm2)")
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
    from tplab.bench import bench

    found = bench(chosen.kind, chosen.model, chosen.tp, rounds=chosen.rounds, dtype=chosen.dtype, vllm=chosen.vllm,
                  llama_cpp=chosen.llama_cpp, batch_invariant=chosen.batch_invariant, busy=chosen.busy)
    if chosen.json is not None:
        write_file(chosen.json, lambda new: new.write_text(json.dumps(found, indent=1)))
    if chosen.picture is not None:
        from tplab.show import curves_figure

        write_file(chosen.picture, lambda new: new.write_bytes(curves_figure(found).png()))
    return 0
