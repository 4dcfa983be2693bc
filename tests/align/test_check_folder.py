"""A recorded folder is read as far as it goes; what the recorder would not have written is refused in a sentence."""

import json
import os
import shutil

import pytest
import torch

from tplab.align.check.folder import RecordingError, read_recorded
from tplab.record import record

MANIFEST, CALL = "manifest.jsonl", "call0.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two ranks: parameters, a call of three tensors of which one is an alias, a second call that is cut off."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    for rank in range(2):
        with record(folder, rank=rank, world_size=2) as rec:
            rec.parameters({"weight": torch.ones(2, 3)})
            rec.inputs([1, 2], [0, 1])
            rec.tensor("x", torch.arange(6.0).reshape(2, 3))
            rec.tensor("view", torch.arange(6.0))
            rec.tensor("y", torch.ones(2, dtype=torch.bfloat16))
            rec.inputs([3])
            rec.tensor("z", torch.full((4,), float(rank)))
            content = {file: file.read_bytes() for file in (folder / f"rank{rank}").iterdir()}
        for file, data in content.items():
            file.write_bytes(data)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def lines_of(folder, rank=0):
    return [json.loads(line) for line in (folder / f"rank{rank}" / MANIFEST).read_text().splitlines()]


def write_lines(folder, lines, rank=0):
    (folder / f"rank{rank}" / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_what_was_cut_off_is_read_as_far_as_it_goes(folder):
    for rank in read_recorded(folder).ranks:
        done, cut = rank.calls
        assert (done.status, cut.status) == ("done", "cut off") and cut.input_ids.tolist() == [3]
        assert [entry.tensor().tolist() for entry in done.entries] == [
            [[0, 1, 2], [3, 4, 5]], [0, 1, 2, 3, 4, 5], [1, 1]]
        assert cut.entries[0].tensor().tolist() == [rank.rank] * 4
        assert rank.parameters["weight"].tensor().tolist() == [[1, 1, 1]] * 2


def test_a_call_of_many_tensors_has_several_files(tmp_path):
    with record(tmp_path / "run", rank=0, world_size=1) as rec:
        for number in range(110):
            rec.tensor("n" * 900 + str(number), torch.tensor(number))
    entries = read_recorded(tmp_path / "run").ranks[0].calls[0].entries
    assert len({entry.file for entry in entries}) == 2 and [int(entry.tensor()) for entry in entries] == [*range(110)]


def test_a_call_that_failed_says_how(tmp_path):
    with pytest.raises(ValueError), record(tmp_path, rank=0, world_size=1) as rec:
        rec.tensor("x", torch.ones(2))
        raise ValueError("no")
    assert read_recorded(tmp_path).ranks[0].calls[0].status == "failed: ValueError: no"


def test_every_prefix_of_a_journal_is_readable(folder):
    # The process may die between any two writes; the tensors' files then hold more than the journal says.
    path = folder / "rank1" / MANIFEST
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        rank = read_recorded(folder).ranks[1]
        assert (rank is None) == (whole[:end].count(b"\n") == 0)
        if end < len(whole) - 7 and rank and rank.calls:
            assert rank.calls[-1].status in ("cut off", "done")
            assert len(rank.calls[-1].entries) <= 3


def test_ranks_that_left_nothing_are_missing(folder):
    shutil.rmtree(folder / "rank0")
    (folder / "notes.txt").write_text("of the owner")
    assert [rank and rank.rank for rank in read_recorded(folder).ranks] == [None, 1]
    (folder / "rank0").mkdir()
    assert read_recorded(folder).ranks[0] is None


def test_a_file_that_shrinks_after_the_folder_was_read(folder):
    entry = read_recorded(folder).ranks[0].calls[0].entries[0]
    os.truncate(folder / "rank0" / CALL, entry.offset + 4)
    with pytest.raises(RecordingError, match="ends within 'x'"):
        entry.tensor()


def change(line, **changes):
    """A damage: the first journal line with this event (or the first line of all) says something else."""
    def damage(folder):
        lines = lines_of(folder)
        found = next(one for one in lines if one.get("event") == line)
        found.update(changes)
        write_lines(folder, lines)
    return damage


def insert(**line):
    """A damage: this line comes after the first call's tensors."""
    def damage(folder):
        lines = lines_of(folder)
        at = next(at for at, one in enumerate(lines) if one.get("event") == "end")
        write_lines(folder, [*lines[:at], line, *lines[at:]])
    return damage


def raw(data, at=None):
    """A damage: these bytes as a journal line of their own, or in place of all from a byte on."""
    def damage(folder):
        path = folder / "rank0" / MANIFEST
        whole = path.read_bytes()
        path.write_bytes(whole + data if at is None else whole[:at] + data)
    return damage


def bytes_of(file, change):
    def damage(folder):
        path = folder / "rank0" / file
        data = change(path.read_bytes())
        path.write_bytes(data)
    return damage


def instead(file, make):
    """A damage: something else in place of an ordinary file."""
    def damage(folder):
        path = folder / "rank0" / file
        path.rename(folder / "elsewhere")
        make(path, folder / "elsewhere")
    return damage


def linked_rank(folder):
    (folder / "rank0").rename(folder.parent / "elsewhere")
    (folder / "rank0").symlink_to(folder.parent / "elsewhere")


def third_rank(folder):
    shutil.copytree(folder / "rank1", folder / "rank2")


def sparse(folder):
    with open(folder / "rank0" / MANIFEST, "r+b") as file:
        file.truncate(3 << 30)


TENSOR = {"event": "tensor", "name": "n", "kind": "tensor", "path": "", "nth": 0, "module_class": "", "dtype": "F32",
          "shape": [3, 2], "key": 0}
ORDINARY = "is not an ordinary file"
WRONG = "line [0-9]+: a recorder writes no such line .*; record again"

DAMAGES = {
    "no folder": (shutil.rmtree, "is not a folder; give the one that record"),
    "empty": (lambda folder: [shutil.rmtree(folder / f"rank{rank}") for rank in range(2)],
              "no rank wrote a line in a folder rank0, rank1, …"),
    "nothing written": (lambda folder: [(folder / f"rank{rank}" / MANIFEST).write_text("") for rank in range(2)],
                        "no rank wrote a line"),
    "two runs": (change(None, run="another"), "two runs are mixed: rank0 says 'another', rank1"),
    "world sizes": (change(None, world_size=3), "disagree about world_size: rank0 says 3, rank1 2"),
    "another rank's journal": (change(None, rank=1), "rank 1 of 2, in a folder named rank0"),
    "rank beyond the world": (third_rank, "rank 1 of 2, in a folder named rank2"),
    "endless world": (change(None, world_size=10**12), "1000000000000 is not a whole number from 0 to 4096"),
    "other format": (change(None, format="onnx"), "it is .'onnx', 1., not tplab-record 1"),
    "other version": (change(None, version=2), "it is .'tplab-record', 2., not"),
    "manifest of gigabytes": (sparse, "has 3,221,225,472 bytes, more than the 268,435,456 that are read"),
    "not UTF-8": (raw(b"\xff\xfe\n"), "line 13: a recorder writes no such line .*utf-8"),
    "no JSON": (raw(b"{]\n"), "line 13: a recorder writes no such line"),
    "nested for ever": (raw(b"[" * 100_000 + b"\n"), "line 13: a recorder writes no such line"),
    "unknown event": (insert(event="explode"), "there is no such event"),
    "tensor before its file": (lambda folder: write_lines(folder, [line for line in lines_of(folder) if line.get(
        "file") != CALL]), WRONG),
    "module before any call": (lambda folder: write_lines(folder, [*lines_of(folder)[:1], {
        "event": "enter", "name": "m"}]), WRONG),
    "call out of turn": (change("call", call=1), WRONG),
    "tensor not yet there": (change("tensor", key=1), WRONG),
    "call no number": (change("call", call="0"), WRONG),
    "ids no integers": (change("call", input_ids=[1.5]), r"\[1.5\] is not whole numbers"),
    "ids of texts": (change("call", input_ids=["a"]), r"\['a'\] is not whole numbers"),
    "ids ragged": (change("call", positions=[[1, 2], [3]]), "is not whole numbers in rows of one length"),
    "texts no object": (change("call", texts=[1]), WRONG),
    "texts of no number": (change("call", texts={"a": [1]}), WRONG),
    "ids an object": (change("call", sequences={"a": 1}), "is not whole numbers"),
    "name that writes on the screen": (insert(**TENSOR | {"name": "\x1b[2J"}), r"'\\x1b\[2J' is not a printable"),
    "endless name": (insert(**TENSOR | {"name": "n" * 10**6}), "is not a printable text of at most 1,000 characters"),
    "kind": (insert(**TENSOR | {"kind": "pickle"}), "'pickle' is not one of in, out, tensor, parameter"),
    "dtype unknown": (insert(**TENSOR | {"dtype": "F128"}), "'F128' is not one of F64, F32"),
    "shape no list": (insert(**TENSOR | {"shape": 6}), WRONG),
    "shape endless": (insert(**TENSOR | {"shape": [2**40, 2**40], "key": 2}), r"has 65,\d+ bytes; its journal says"),
    "shape beyond numbers": (insert(**TENSOR | {"shape": [2**60]}), "is not a whole number from 0 to"),
    "alias of another size": (insert(**TENSOR | {"shape": [2**40, 2**40]}), WRONG),
    "alias of the future": (insert(**TENSOR | {"key": 9}), WRONG),
    "file name that leads away": (insert(event="file", file="../../secret.safetensors", room=0),
                                  "call0.1.safetensors is missing, but"),
    "file missing": (lambda folder: (folder / "rank0" / CALL).unlink(), "call0.safetensors is missing, but"),
    "parameters missing": (lambda folder: (folder / "rank0/parameters.safetensors").unlink(),
                           "parameters.safetensors is missing"),
    "manifest missing": (lambda folder: (folder / "rank0" / MANIFEST).unlink(), "manifest.jsonl is missing"),
    "data of a cut-off call truncated": (bytes_of("call1.safetensors", lambda data: data[:-1]),
                                         "bytes; its journal says"),
    "header truncated": (bytes_of(CALL, lambda data: data[:5]), "has 5 bytes; its journal says"),
    "pipe for a manifest": (instead(MANIFEST, lambda path, _: os.mkfifo(path)),
                            f"{MANIFEST} {ORDINARY}"),
    "pipe for tensors": (instead(CALL, lambda path, _: os.mkfifo(path)), f"{CALL} {ORDINARY}"),
    "link for tensors": (instead(CALL, lambda path, old: path.symlink_to(old)),
                         f"{CALL} {ORDINARY}"),
    "folder for tensors": (instead(CALL, lambda path, _: path.mkdir()), f"{CALL} {ORDINARY}"),
    "link for a rank": (linked_rank, "rank0 is not a folder"),
    "file for a rank": (lambda folder: (shutil.rmtree(folder / "rank0"), (folder / "rank0").write_text("")),
                        "rank0 is not a folder"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.replace(" ", "-"))
def test_a_malformed_folder_is_refused_in_a_sentence(folder, damage):
    spoil, sentence = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(RecordingError, match=sentence) as caught:
        read_recorded(folder)
    message = str(caught.value)
    assert message.startswith(str(folder)) and len(message) < len(str(folder)) + 600
    assert message.isprintable()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission(folder):
    (folder / "rank0" / CALL).chmod(0)
    with pytest.raises(RecordingError, match="cannot be read"):
        read_recorded(folder)
