"""``python -m course bench``: a race beside Hugging Face and vLLM."""

import argparse


def add_options(parser: argparse.ArgumentParser, models: str) -> None:
    """``models``: the models' names, for the help."""
    parser.add_argument("--model", default="smollm2", metavar="MODEL", help=f"{models} (smollm2)")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="5 or more (5)")
    parser.add_argument("--dtype", default="float32", help="float32, float64 or bfloat16 (float32)")
    parser.add_argument("--vllm", metavar="PYTHON", help="race against vLLM too: the Python of its own environment")


def main(chosen: argparse.Namespace) -> int:
    """Measure and show."""
    from course.cost.race import race

    race(chosen.model, chosen.tp, rounds=chosen.rounds, dtype=chosen.dtype, vllm=chosen.vllm)
    return 0
