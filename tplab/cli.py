"""``python -m tplab``: the library's functions from a terminal.

Exit codes: 0 done, 1 the numbers are outside the floor, 2 bad input or a failed rank (explained on stderr), 130
interrupted. A command imports only what it needs, so that ``--help`` is quick.
"""

import argparse
import errno
import os
import sys
import textwrap

from tplab import __version__
from tplab.checks import counted
from tplab.errors import TplabError
from tplab.files import check_working_folder, check_writable, replace_unprintable, write_file

MODEL = "fable, fable-moe, smollm2, a folder, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
EXPERTS = "give each rank whole experts, not a part of each"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line long."""

    def error(self, message):
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    replace_unprintable()
    try:
        parser = build_parser()
        chosen, unknown = parser.parse_known_args(arguments)
        if unknown:
            chosen.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        check_working_folder()
        code = chosen.run(chosen)
        if sys.stdout is not None:
            sys.stdout.flush()  # so a full disk is reported here, not when Python ends
        return code
    except TplabError as error:
        words = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(error))
        print(f"tplab: {words}", file=sys.stderr)  # file names may hold control characters
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again when it ends
        if error.errno == errno.EPIPE:  # `tplab … | head`: the reader has closed the pipe
            return 0
        print(f"tplab: {error.strerror}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    called = "tplab" if os.path.basename(sys.argv[0]) == "tplab" else "python -m tplab"
    parser = _Parser(prog=called,
                     description="Tensor-parallel LLM inference, measured against Hugging Face.", allow_abbrev=False)
    parser.set_defaults(run=lambda chosen: parser.print_help() or 0, parser=parser)
    parser.add_argument("--version", action="version", version=f"tplab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name, run, about, *, model=True, tp=True):
        made = commands.add_parser(name, help=about[0].lower() + about[1:].rstrip("."), description=about,
                                   allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        made.set_defaults(run=run, parser=made)
        if model:
            made.add_argument("model", metavar="MODEL", help=MODEL)
        if tp:
            made.add_argument("--tp", type=int, default=2, metavar="N", help="number of ranks (2)")
        return made

    one = command("plan", plan, "Show what each rank holds (heads, MLP columns, vocabulary rows) and the memory that "
                  "it needs.", model=False)
    which = one.add_mutually_exclusive_group(required=True)
    which.add_argument("model", metavar="MODEL", nargs="?", help=MODEL)
    which.add_argument("--config", metavar="FILE", help="the config.json of a published model, without its weights")
    one.add_argument("--expert-parallel", action="store_true", help=EXPERTS)
    one.add_argument("--dtype", default="float32", help="float32, float64 or bfloat16 (float32)")

    one = command("align", align, "Compare every trace point with Hugging Face's. Exit code 1 if outside the floor.")
    one.add_argument("--dtype", default="float32", help="float32, float64 or bfloat16 (float32)")
    what = one.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="the text (a built-in one); - reads standard input")
    what.add_argument("--ids", metavar="1,2,3", help="token ids instead of a text")
    one.add_argument("--fault", nargs="+", action="extend", default=[], metavar="NAME",
                     help="break the engine with these faults of the museum first")
    one.add_argument("--expert-parallel", action="store_true", help=EXPERTS)
    one.add_argument("--fast", action="store_true", help="instead, compare the fast path's results with float64: "
                     "hidden states, logits, keys and values")
    one.add_argument("--json", metavar="FILE", help="write the whole report")
    one.add_argument("--save", metavar="FILE.safetensors", help="write tp_logits and hf_logits, [tokens, vocab]")

    one = command("check", check, "Check any engine by the folder that tplab/record.py wrote beside it. What is told "
                  "(rec.inputs, --name, --layout) is believed and judged; the rest is found by names and sizes; where "
                  "these do not decide, one question is asked. Exit code 1: a bug; 2: the recording does not tell.",
                  model=False, tp=False)
    one.add_argument("folder", metavar="FOLDER", help="the folder that record(...) wrote")
    one.add_argument("--model", required=True, metavar="MODEL", help=f"the checkpoint that the engine runs: {MODEL}")
    one.add_argument("--name", nargs="+", action="extend", default=[], metavar="PATTERN=POINT",
                     help="what tensors are, if their names say nothing: blocks.{i}.mix.out=o_proj; "
                     "'draft.*=' leaves tensors out")
    one.add_argument("--layout", nargs="+", action="extend", default=[], metavar="WORD",
                     help="pairs: the numbers in each head of q and k lie in pairs, as in Meta's own files; groups: a "
                     "fused q|k|v lies KV head by KV head")
    one.add_argument("--json", metavar="FILE", help="write the whole report")

    listed = command("faults", faults, "List the museum of bugs, or show some of them with their code.",
                     model=False, tp=False)
    listed.add_argument("names", nargs="*", metavar="NAME", help="faults to show with broken and right code")

    fetching = command("fetch", fetch, "Get a real model once, into the user's cache.", model=False, tp=False)
    fetching.add_argument("model", metavar="MODEL", help="smollm2")

    one = command("generate", generate, "Continue a prompt on tensor-parallel ranks, printed as it is generated.")
    one.add_argument("--prompt", metavar="TEXT", required=True, help="the text; - reads standard input")
    one.add_argument("--chat", action="store_true", help="the prompt is a user's message, by the model's chat template")
    one.add_argument("--max-tokens", type=int, default=128, metavar="N", help="the most new tokens (128)")
    one.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    one.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    one.add_argument("--dtype", default="float32", help="float32, float64 or bfloat16 (float32)")
    one.add_argument("--batch-invariant", action="store_true", help="the same bits in any batch, on any ranks")
    one.add_argument("--num-speculative-tokens", type=int, default=0, metavar="N",
                     help="the most draft tokens in a step; those that the model itself chooses are kept (0)")
    one.add_argument("--json", metavar="FILE", help="write prompt, text, token ids and metrics")
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
    from tplab.align import align, align_decode, diagnose
    from tplab.checkpoint import open_checkpoint
    from tplab.checkpoint.prompts import default_prompt
    from tplab.faults import fault, scenario

    broken = [fault(name) for name in chosen.fault]
    ckpt = open_checkpoint(chosen.model)
    if chosen.fast:
        return _align_fast(chosen, ckpt, default_prompt(ckpt) if prompt is None else prompt)
    decoding = [one.name for one in broken if one.shows_in == "decode"]
    if prompt is not None or not decoding:
        run = {"prompts": default_prompt(ckpt) if prompt is None else prompt}
    else:
        run = scenario(decoding[0], ckpt.config.vocab_size)
        print(f"note: without --prompt, random tokens are used, and engine options with which {decoding[0]} shows")
    if decoding:
        print("note: the decode path is compared, one token at a time; a forward pass does not show these faults")
    run["enable_expert_parallel"] = chosen.expert_parallel
    for one in broken:
        run |= {} if one.why_not(ckpt.config, chosen.tp) else one.options
    report = (align_decode if decoding else align)(ckpt, **run, tensor_parallel_size=chosen.tp, dtype=chosen.dtype,
                                                   patches=broken)
    for one in broken:
        if why := one.why_not(ckpt.config, chosen.tp):
            print(f"note: {one.name} changes nothing here: {why}")
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


def _align_fast(chosen, ckpt, prompt) -> int:
    from tplab.align import align_fast

    if unfit := [name for name in ("fault", "json", "save") if getattr(chosen, name)]:
        raise TplabError(f"--fast compares the healthy engine and writes no file; leave out --{unfit[0]}")
    report = align_fast(ckpt, prompt, tensor_parallel_size=chosen.tp, dtype=chosen.dtype)
    print(report)
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
        for notebook in dict.fromkeys(one.notebook for one in MUSEUM.values()):
            print(notebook)
            print("\n".join(f"  {one.name:30}{one.title}" for one in MUSEUM.values() if one.notebook == notebook))
        return 0
    for one in [fault(name) for name in chosen.names]:
        parts = [str(one), textwrap.fill(one.symptom, 90), f"first point: {one.first_point}; notebook: {one.notebook}",
                 "broken:\n" + textwrap.indent(one.broken, "    "), "right:\n" + textwrap.indent(one.right, "    "),
                 *(f"seen in the wild: {text}\n  {link}" for text, link in one.sightings)]
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
    import json

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
        write_file(chosen.json, lambda new: new.write_text(json.dumps(chunk.output.to_dict(), indent=1)))
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
    if text != "-":
        return text
    if sys.stdin is None:
        raise TplabError("--prompt - reads standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise TplabError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


def _check_writable(*paths: str | None) -> None:
    given = [path for path in paths if path is not None]
    for path in given:
        check_writable(path)
    if len({os.path.realpath(path) for path in given}) < len(given):
        raise TplabError(f"--json and --save would both write {given[0]}; give them two names")
