"""``python -m tplab``: the library's functions from a terminal.

Exit codes: 0 done, 1 the numbers are outside the floor, 2 bad input or a failed rank (explained on stderr), 130
interrupted. A command imports only what it needs, so that ``--help`` is quick.
"""

import argparse
import gc
import json
import os
import sys
import textwrap
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tplab import __version__
from tplab.checks import counted
from tplab.errors import TplabError

MODEL = "fable, fable-moe, smollm2, a folder, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
EXPERTS = "give each rank whole experts, not a part of each"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    chosen = build_parser().parse_args(arguments)
    gc.set_threshold(10_000, 10, 10)  # by default, garbage collection takes a fifth of the imports' time
    try:
        code = chosen.run(chosen)
        print(end="", flush=True)  # what cannot be written is reported here, not when Python ends
        return code
    except BrokenPipeError:  # `tplab … | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again when it ends
        return 0
    except (TplabError, OSError) as error:
        print(f"tplab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(prog="tplab", allow_abbrev=False,
                                     description="Tensor-parallel LLM inference, measured against Hugging Face.")
    parser.set_defaults(run=lambda chosen: parser.print_help() or 0)
    parser.add_argument("--version", action="version", version=f"tplab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name, run, about, *, on_ranks=True, model=True):
        new = commands.add_parser(name, help=about[0].lower() + about[1:].rstrip("."), description=about,
                                  allow_abbrev=False)
        new.set_defaults(run=run)
        if model:
            new.add_argument("model", metavar="MODEL", help=MODEL)
        if on_ranks:
            new.add_argument("--tp", type=int, default=2, metavar="N", help="number of ranks (2)")
            new.add_argument("--dtype", default="float32", help="float32, float64 or bfloat16 (float32)")
        return new.add_argument, new

    option, planning = command("plan", plan, "Show what each rank holds (heads, MLP columns, vocabulary rows) and the "
                               "memory that it needs.", model=False)
    which = planning.add_mutually_exclusive_group(required=True)
    which.add_argument("model", metavar="MODEL", nargs="?", help=MODEL)
    which.add_argument("--config", metavar="FILE", help="the config.json of a published model, without its weights")
    option("--expert-parallel", action="store_true", help=EXPERTS)

    option, aligning = command("align", align, "Compare every trace point with Hugging Face's. Exit code 1 if outside "
                               "the floor.")
    what = aligning.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="the text (a built-in one); - reads standard input")
    what.add_argument("--ids", metavar="1,2,3", help="token ids instead of a text")
    option("--fault", nargs="+", action="extend", default=[], metavar="NAME",
           help="break the engine with these faults of the museum first")
    option("--expert-parallel", action="store_true", help=EXPERTS)
    option("--fast", action="store_true",
           help="instead, compare the fast path's results with float64: hidden states, logits, keys and values")
    option("--json", metavar="FILE", help="write the whole report")
    option("--save", metavar="FILE.safetensors", help="write tp_logits and hf_logits, [tokens, vocab]")

    option, _ = command("check", check, "Check any engine by the folder that tplab/record.py wrote beside it. What is "
                        "told (rec.inputs, --name, --layout) is believed and judged; the rest is found by names and "
                        "sizes; where these do not decide, one question is asked. Exit code 1: a bug; 2: the recording "
                        "does not tell.", on_ranks=False, model=False)
    option("folder", metavar="FOLDER", help="the folder that record(...) wrote")
    option("--model", required=True, metavar="MODEL", help=f"the checkpoint that the engine runs: {MODEL}")
    option("--name", nargs="+", action="extend", default=[], metavar="PATTERN=POINT",
           help="what tensors are, if their names do not say it: blocks.{i}.mix.out=o_proj; 'draft.*=' leaves some out")
    option("--layout", nargs="+", action="extend", default=[], metavar="WORD",
           help="pairs: the numbers in each head of q and k lie in pairs, as in Meta's own files; groups: a fused "
                "q|k|v lies KV head by KV head")
    option("--json", metavar="FILE", help="write the whole report")

    option, _ = command("faults", faults, "List the museum of bugs, or show some of them with their code.",
                        on_ranks=False, model=False)
    option("names", nargs="*", metavar="NAME", help="faults to show with broken and right code")

    option, _ = command("fetch", fetch, "Get a real model once, into the user's cache.", on_ranks=False, model=False)
    option("model", metavar="MODEL", help="smollm2")

    option, _ = command("generate", generate, "Continue a prompt on tensor-parallel ranks, printed as it is generated.")
    option("--prompt", metavar="TEXT", required=True, help="the text; - reads standard input")
    option("--chat", action="store_true", help="the prompt is a user's message, by the model's chat template")
    option("--max-tokens", type=int, default=128, metavar="N", help="the most new tokens (128)")
    option("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    option("--seed", type=int, metavar="S", help="the same seed gives the same text")
    option("--batch-invariant", action="store_true", help="the same bits in any batch, on any ranks")
    option("--num-speculative-tokens", type=int, default=0, metavar="N",
           help="the most draft tokens in a step; those that the model itself chooses are kept (0)")
    option("--json", metavar="FILE", help="write prompt, text, token ids and metrics")
    return parser


def plan(chosen) -> int:
    from tplab.checkpoint import open_checkpoint
    from tplab.fast import why_not
    from tplab.memory import config_file, memory_lines
    from tplab.model.dtypes import parse_dtype
    from tplab.shard import ShardPlan

    dtype = parse_dtype(chosen.dtype)
    if chosen.config is not None:
        config, lines = config_file(chosen.config, dtype)
        _print_lines(lines)
    else:
        config = open_checkpoint(chosen.model).config
    made = ShardPlan.from_config(config, chosen.tp, enable_expert_parallel=chosen.expert_parallel)
    print(f"{_about(chosen.config or chosen.model, config)}\n{made}")
    if why := why_not(config, dtype):
        print(f"the reference computes it; of the fast path: {why}")
    print("\n".join(memory_lines(config, made, dtype)))
    return 0


def align(chosen) -> int:
    _check_writable(chosen.json, chosen.save)
    prompt = _read_prompt(chosen.prompt) if chosen.ids is None else _parse_ids(chosen.ids)
    from tplab.align import align, align_decode, align_fast, diagnose
    from tplab.checkpoint import open_checkpoint
    from tplab.checkpoint.prompts import default_prompt
    from tplab.faults import fault, scenario

    broken = [fault(name) for name in chosen.fault]
    ckpt = open_checkpoint(chosen.model)
    if chosen.fast:
        if unfit := [name for name in ("fault", "json", "save") if getattr(chosen, name)]:
            raise TplabError(f"--fast compares the healthy engine and writes no file; leave out --{unfit[0]}")
        ends = align_fast(ckpt, default_prompt(ckpt) if prompt is None else prompt, tensor_parallel_size=chosen.tp,
                          dtype=chosen.dtype)
        print(ends)
        return 0 if ends.ok else 1
    decoding = [bug.name for bug in broken if bug.shows_in == "decode"]
    if prompt is not None or not decoding:
        run = {"prompts": default_prompt(ckpt) if prompt is None else prompt}
    else:
        run = scenario(decoding[0], ckpt.config.vocab_size)
        print(f"note: without --prompt, random tokens are used, and engine options with which {decoding[0]} shows")
    if decoding:
        print("note: the decode path is compared, one token at a time; a forward pass does not show these faults")
    run["enable_expert_parallel"] = chosen.expert_parallel
    for bug in broken:
        run |= {} if bug.why_not(ckpt.config, chosen.tp) else bug.options
    report = (align_decode if decoding else align)(ckpt, **run, tensor_parallel_size=chosen.tp, dtype=chosen.dtype,
                                                   patches=broken)
    for bug in broken:
        if why := bug.why_not(ckpt.config, chosen.tp):
            print(f"note: {bug.name} changes nothing here: {why}")
    print(report.summary())
    if report.load_stats:
        print("read from the checkpoint: " + ", ".join(
            f"{stats.bytes_read / 1e6:.1f} MB by rank {rank}" for rank, stats in enumerate(report.load_stats)))
    print(f"\n{_point_lines(report)}")
    if broken or not report.ok:
        print()
        _print_lines(report.diagnosis_lines() or [diagnose(report).sentence])
    if chosen.json is not None:
        report.to_json(chosen.json)
    if chosen.save is not None:
        report.save_logits(chosen.save)
    return 0 if report.ok else 1


def check(chosen) -> int:
    _check_writable(chosen.json)
    unsaid = [text for text in chosen.name if not all(text.partition("=")[:2])]
    if unsaid:
        raise TplabError(f"--name takes PATTERN=POINT, such as blocks.{{i}}.mix.out=o_proj; not {unsaid[0]!r}")
    from tplab.align import check

    report = check(chosen.folder, chosen.model, names=dict(text.split("=", 1) for text in chosen.name),
                   layout=chosen.layout)
    _print_lines(report.summary().splitlines())
    print(f"\n{report.point_lines()}")
    if chosen.json is not None:
        report.to_json(chosen.json)
    return {"clean": 0, "bug": 1, "cannot tell": 2}[report.verdict]


def faults(chosen) -> int:
    from tplab.faults import MUSEUM, fault

    if not chosen.names:
        for notebook, group in groupby(sorted(MUSEUM.values(), key=attrgetter("notebook")), attrgetter("notebook")):
            print("\n".join([notebook, *(f"  {bug.name:30}{bug.title}" for bug in group)]))
        return 0
    for bug in [fault(name) for name in chosen.names]:
        parts = [str(bug), textwrap.fill(bug.symptom, 90), f"first point: {bug.first_point}; notebook: {bug.notebook}",
                 "broken:\n" + textwrap.indent(bug.broken, "    "), "right:\n" + textwrap.indent(bug.right, "    "),
                 *(f"seen in the wild: {text}\n  {link}" for text, link in bug.sightings)]
        print("\n\n".join(parts) + "\n")
    return 0


def fetch(chosen) -> int:
    from tplab.checkpoint import fetch, open_checkpoint

    folder = fetch(chosen.model)
    print(f"{_about(chosen.model, open_checkpoint(chosen.model).config)}\nin {folder}")
    return 0


def generate(chosen) -> int:
    _check_writable(chosen.json)
    prompt = _read_prompt(chosen.prompt)
    if not prompt.strip():
        raise TplabError("the prompt is empty; give a text")
    from tplab.llm import SamplingParams, open_llm

    params = SamplingParams(max_tokens=chosen.max_tokens, temperature=chosen.temperature, seed=chosen.seed)
    with open_llm(chosen.model, chosen.tp, chosen.dtype, batch_invariant=chosen.batch_invariant,
                  num_speculative_tokens=chosen.num_speculative_tokens) as llm:
        if llm is None:  # a rank of torchrun's other than 0
            return 0
        if chosen.chat:
            prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
        for chunk in llm.stream(prompt, params):
            print(chunk, end="", flush=True)
    print()
    metrics = chunk.output.metrics
    guessed = (f", {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} draft tokens kept"
               if chosen.num_speculative_tokens else "")
    print(f"[{metrics.num_output_tokens} tokens{guessed}, first after {metrics.time_to_first_token:.2f} s, "
          f"{metrics.tokens_per_second:.0f} tokens/s, {counted(llm.plan.tensor_parallel_size, 'rank')}]",
          file=sys.stderr)
    if chosen.json is not None:
        Path(chosen.json).write_text(json.dumps(chunk.output.to_dict(), indent=1))
    return 0


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        print(textwrap.fill(line, 100, subsequent_indent="   "))


def _about(name: str, c) -> str:
    return (f"{name}: {c.model_type}, {c.num_layers} layers, hidden size {c.hidden_size}, "
            f"{c.num_heads} query and {c.num_kv_heads} KV heads of {c.head_dim}")


def _point_lines(report) -> str:
    """The layers' outputs and the ends of the model; of the first layer outside the floor, every point."""
    ends, first = ("embed", "output", "norm", "logits"), report.first_divergence
    layer = "" if first is None else first.name.rpartition(".")[0]
    lines = [f"{'point':24}{'max |Δ|':>10}{'relative':>10}{'NaN':>9}"]
    for point in report.points:
        of_layer, _, last = point.name.rpartition(".")
        if last in ends or of_layer == layer:
            mark = "" if point.inside else "  outside" + (", first" if point is first else "")
            line = f"{point.name:24}{point.max_abs:10.1e}{point.relative:10.1e}{point.nan:9}{mark}"
            lines.append(line.replace("nan", "NaN"))
    return "\n".join(lines)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise TplabError(f"--ids takes whole numbers with commas between them, such as 1,2,3; not {text!r}") from None


def _read_prompt(text: str | None) -> str | None:
    """What ``--prompt`` stands for: itself, or with ``-`` all of standard input without its last line's end."""
    try:
        return sys.stdin.read().removesuffix("\n") if text == "-" else text
    except UnicodeDecodeError as error:
        raise TplabError(f"standard input is no text: {error}") from None


def _check_writable(*paths: str | None) -> None:
    """Before minutes of work."""
    for path in paths:
        if path is not None and (os.path.isdir(path) or not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK)):
            raise TplabError(f"{path} cannot be written; give the name of a file, in a folder that can be written")
