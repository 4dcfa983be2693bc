"""The command line: exit codes, one line for every mistake, what is written where."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import pytest
from helpers.checkpoints import make_checkpoint
from safetensors import safe_open

import tplab.align
import tplab.llm
from tplab import cli

BAD = [
    ("plan no_such_folder", "no folder 'no_such_folder'; a model is 'fable'"),
    ("plan smolm2", "no folder 'smolm2'; did you mean 'smollm2'?"),
    ("plan {model} --tp 0", "tensor_parallel_size must be a whole number from 1 to 4, not 0"),
    ("plan {model} --tp 99", "99 ranks cannot share 4 query heads"),
    ("align {model} --tp two", "invalid int value: 'two'"),
    ("align {model} --ids 1,x", "not '1,x'"), ("align {model} --ids=", "--ids takes whole numbers"),
    ("align {model} --ids 1,67", "token id 67 is not in"),
    ("align {model} --ids=-1", "token id -1 is not in"),
    ("align {model} --ids 1,2 --prompt words", "not allowed with"),
    ("align {model} --ids 1,2 --dtype float16", "'float16' is not one of float32, float64, bfloat16"),
    ("align {model} --ids 1,2 --fault nan_musk", "no fault 'nan_musk'; did you mean 'nan_mask' or 'no_mask'?"),
    ("align {model} --ids 1,2 --json {folder}", "cannot be written; give the name of a file"),
    ("align {model} --ids 1,2 --json {folder}/no/report.json", "no/report.json cannot be written"),
    ("align {model} --ids 1,2 --save {folder}/no/l.safetensors", "in a folder that can be written"),
    ("align {model}", "tokenizer"),
    ("faults nan_mask nan_musk", "no fault 'nan_musk'"),
    ("fetch gpt-7", "'gpt-7' cannot be fetched"),
    ("generate {model}", "--prompt"),
    ("generate {model} --chat --prompt=", "the prompt is empty"),
    ("generate {model} --prompt a --max-tokens 0", "max_tokens must be a whole number from 1"),
    ("generate {model} --prompt a --temperature=-1", "temperature must be a number from 0"),
    ("generate {model} --prompt a --json {folder}/no/out.json", "out.json cannot be written"),
    ("tensor", "invalid choice: 'tensor'"), ("--foo", "unrecognized arguments: --foo"),
    ("align {model} --i 1,2", "unrecognized arguments: --i 1,2"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("cli") / "model"))


@pytest.fixture
def logical(monkeypatch):
    """Ranks as threads: these tests are about words and exit codes."""
    monkeypatch.setattr(tplab.align, "align", partial(tplab.align.align, logical=True))


def run(line, capsys):
    try:
        code = cli.main(line.split())
    except SystemExit as leaving:  # argparse's way out
        code = leaving.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("line, words", BAD, ids=[line[:60] or "nothing" for line, _ in BAD])
def test_bad_input_is_exit_2_and_says_why(line, words, model, tmp_path, capsys):
    """On real ranks these would take seconds: nothing may be started before the words are understood."""
    code, out, err = run(line.format(model=model, folder=tmp_path), capsys)
    assert (code, out) == (2, "")
    *usage, said = err.splitlines()
    assert words in said and said.startswith("tplab") and all("Traceback" not in line for line in usage)


def test_a_file_that_cannot_be_written_is_found_before_anything_is_computed(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tplab.align, "align", lambda *args, **options: pytest.fail("the ranks were asked first"))
    assert run(f"align {model} --ids 1,2 --save {tmp_path}/no/l.safetensors", capsys)[0] == 2


@pytest.mark.parametrize("given, words", [
    (b"Mira \xff", "standard input is no text: 'utf-8' codec can't decode byte 0xff in position 5"),
    (b" \t\n\n", "the prompt is empty")])
def test_a_standard_input_that_is_no_prompt_is_one_line(given, words, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    code, out, err = run("generate fable --prompt -", capsys)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has this device")
def test_output_onto_a_full_disk_is_one_line():
    done = subprocess.run(f"{sys.executable} -m tplab faults > /dev/full", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "tplab: [Errno 28] No space left on device\n")


def test_a_command_that_is_ended_leaves_no_process_and_no_folder(tmp_path):
    temporary = Path(tempfile.mkdtemp())  # a short name, for the sockets in it
    command = [sys.executable, "-m", "tplab", "generate", "fable", "--prompt", "Once", "--max-tokens", "400"]
    environment = {**os.environ, "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # torch's
    # What a parent ignores (nohup), its child would ignore too.
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, preexec_fn=heard) as process:
        process.stdout.read(1)  # the ranks are at work
        assert not [file for file in psutil.Process(process.pid).memory_maps() if "llvmlite" in file.path], (
            "only a rank imports the compiler")
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=30) == -signal.SIGHUP
        assert len(ranks) >= 2 and psutil.wait_procs(ranks, timeout=30)[1] == []
    temporary.rmdir()  # nothing is left in it


def test_align_inside_the_floor_is_exit_0_and_writes_what_it_promises(model, tmp_path, capsys, logical):
    report, logits = tmp_path / "r.json", tmp_path / "l.safetensors"
    code, out, err = run(f"align {model} --tp 3 --dtype float64 --ids 1,2,3,4,5 --json {report} --save {logits}",
                         capsys)
    assert (code, err) == (0, "")
    assert "logits" in out and " MB by rank 2\n" in out and "outside" not in out
    written = json.loads(report.read_text())
    assert {"model", "tp", "dtype", "plan", "max_abs_diff", "top1_agreement", "rank_spread", "nan_count",
            "first_divergence", "points"} <= set(written)
    assert (written["tp"], written["dtype"], written["first_divergence"],
            written["ids"]) == (3, "float64", None, [[1, 2, 3, 4, 5]])
    with safe_open(logits, "pt") as saved:
        assert set(saved.keys()) == {"tp_logits", "hf_logits"}
        assert list(saved.get_tensor("tp_logits").shape) == [5, 67]


def test_align_outside_the_floor_is_exit_1_and_names_the_point_and_the_cause(model, capsys, logical):
    code, out, err = run(f"align {model} --ids 1,2,3,4,5 --fault nan_mask", capsys)
    assert (code, err) == (1, "")
    (first,) = [line for line in out.splitlines() if "outside, first" in line]
    assert first.startswith("layers.0.attn ") and "NaN" in first
    assert "layers.0.k_rope" in out and "layers.1.k_rope" not in out
    assert "The mask is multiplied by -inf" in out.replace("\n", " ")


def test_align_names_all_bugs_as_check_does(model, capsys, logical):
    _, out, _ = run(f"align {model} --ids 1,2,3,4,5 --fault no_mask rope_missing head_random", capsys)
    said = out.rpartition("\n\n")[2].splitlines()
    assert [line.split(". ")[1] for line in said if line[0].isdigit()] == [
        "layers 0–1: q_rope, k_rope: rope_missing (or rope_swallowed)", "layers 0–1: attn: no_mask",
        "logits: head_random"]
    assert max(map(len, said)) <= 100


def test_a_fault_that_changes_nothing_says_so(model, capsys, logical):
    code, out, _ = run(f"align {model} --ids 1,2,3 --fault row_bias_everywhere", capsys)
    assert code == 0 and out.startswith("note: row_bias_everywhere changes nothing here: ")
    assert out.endswith("\n\nNothing is wrong: every trace point is inside the rounding floor.\n")
    _, out, _ = run(f"align {model} --ids 1,2,3 --fault nan_mask row_bias_everywhere", capsys)
    assert "note: row_bias_everywhere changes nothing here: " in out and "note: nan_mask" not in out


@pytest.mark.parametrize("name", ["stale_block_table", "block_leaked", "prefix_hash_without_parent"])
def test_without_a_prompt_a_fault_of_decoding_is_given_a_run_in_which_it_shows(name, model, capsys, monkeypatch):
    monkeypatch.setattr(tplab.align, "align_decode", partial(tplab.align.align_decode, logical=True))
    code, out, _ = run(f"align {model} --fault {name}", capsys)
    assert out.startswith(f"note: without --prompt, random tokens are used, and engine options with which {name} shows")
    assert "Nothing is wrong" not in out and "Unknown cause" not in out
    assert code == (0 if name == "block_leaked" else 1), "a leak changes no number"


def test_a_fault_of_decoding_is_looked_for_along_the_decode_path(model, capsys, monkeypatch):
    monkeypatch.setattr(tplab.align, "align_decode", partial(tplab.align.align_decode, logical=True))
    code, out, _ = run(f"align {model} --ids {','.join(map(str, range(20)))} --fault decode_position_restarted", capsys)
    assert code == 1 and out.startswith("note: the decode path is compared")
    assert "layers.0.q_rope" in out.partition("outside, first")[0]


def test_the_museum_is_listed_and_shown(capsys):
    from tplab.faults import MUSEUM

    code, out, _ = run("faults", capsys)
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    listed, notebook = [], None
    for line in out.splitlines():
        notebook = notebook if line.startswith("  ") else line
        listed += [(line.split()[0], notebook)] if line.startswith("  ") else []
    assert listed == sorted(((one.name, one.notebook) for one in MUSEUM.values()), key=lambda pair: pair[1])
    code, out, _ = run("faults nan_mask", capsys)
    assert code == 0 and "broken:\n" in out and "masked_fill" in out.partition("right:\n")[2]


def test_generate_streams_the_text_and_keeps_the_numbers_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tplab.llm.torchrun.LLM", partial(tplab.llm.LLM, logical=True))
    written = tmp_path / "out.json"
    code, out, err = run(f"generate fable --tp 3 --prompt Mira --max-tokens 5 --json {written}", capsys)
    result = json.loads(written.read_text())
    assert code == 0 and out == f"{result['text']}\n" and len(result["token_ids"]) == 5
    assert err.startswith("[5 tokens, first after ") and err.endswith("3 ranks]\n")
    more = "--batch-invariant --num-speculative-tokens 3 --max-tokens 30"
    code, longer, err = run(f"generate fable --tp 3 --prompt Mira {more}", capsys)
    assert code == 0 and longer.startswith(result["text"])
    assert re.match(r"\[30 tokens, [1-9]\d* of \d+ draft tokens kept, first after ", err)
    code, _, err = run(f"generate fable --tp 5 --prompt Mira {more}", capsys)
    assert code == 2 and "does not support 5 ranks: its sums are made for 1, 2, 3, 4, 6 or 8" in err


def test_an_interrupt_is_exit_130_without_a_traceback(model, capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(tplab.align, "align", interrupted)
    assert run(f"align {model} --ids 1,2", capsys) == (130, "", "")


def test_help_does_not_wait_for_torch():
    check = "import sys, tplab.cli; tplab.cli.build_parser().format_help(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.pool
def test_the_whole_way_on_real_ranks(model, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["align", model, "--tp", "2", "--ids", "5,6,7"]) == 0
    out, err = capfd.readouterr()
    assert "inside the floor" in out and err == ""


def test_a_closed_output_and_a_defect(monkeypatch):
    def broken(chosen):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("sys.stdout", None)
    assert cli.main(["faults"]) == 0
    monkeypatch.setattr(cli, "faults", broken)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        cli.main(["faults"])
