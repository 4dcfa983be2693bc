"""What the recorder writes, byte by byte, and its bounds: the first line, the files, how much is kept and how deep."""

import json
from dataclasses import dataclass, field

import pytest
import torch
from helpers.modules import IDS, Calls, Toy, recorded
from safetensors.torch import load_file
from torch import nn

from tplab.align.check.folder import read_recorded
from tplab.record import _ROOM, DTYPES, VERSION, RecordError, record


def lines(folder, rank=0):
    return [json.loads(line) for line in (folder / f"rank{rank}/manifest.jsonl").read_text().splitlines()]


def test_the_first_line_says_whose_journal_it_is(tmp_path):
    with record(tmp_path / "run", rank=1, world_size=3):
        pass
    first, = lines(tmp_path / "run", 1)
    assert first == {"format": "tplab-record", "version": VERSION, "rank": 1, "world_size": 3,
                     "torch": torch.__version__, "run": f"inode {(tmp_path / 'run').stat().st_ino}"}


def test_a_journal_line_by_line(tmp_path):
    def fail(x):
        raise ValueError("no")
    with pytest.raises(ValueError), record(tmp_path, rank=0, world_size=1) as rec:
        rec.watch(Calls(lambda x: x + 1), "good")
        rec.watch(model := Calls(fail), "bad")
        rec.inputs([[1, 2]], [[0, 1]], [7])
        rec.tensor("t", torch.ones(2, dtype=torch.bfloat16))
        rec.tensor("m", torch.ones(1, device="meta"))
        model(torch.ones(3))
    found = lines(tmp_path)[1:]
    about = {"path": "", "nth": 0, "module_class": ""}
    assert found[:3] == [
        {"event": "call", "call": 0, "skipped": False, "input_ids": [[1, 2]], "positions": [[0, 1]], "sequences": [7]},
        {"event": "file", "file": "call0.safetensors", "room": _ROOM},
        {"event": "tensor", "name": "t", "kind": "tensor", "dtype": "BF16", "shape": [2], "key": 0} | about]
    assert found[3] == {"event": "left out", "name": "m", "kind": "tensor", "path": "", "nth": 0,
                        "why": "torch.float32 in layout torch.strided on meta cannot be kept"}
    assert found[4] == {"event": "enter", "name": "bad"}
    assert found[5] == {"event": "tensor", "name": "bad", "kind": "in", "path": "0", "nth": 0, "module_class": "Calls",
                        "dtype": "F32", "shape": [3], "key": 1}
    assert found[6:] == [{"event": "leave", "name": "bad", "error": "ValueError: no"},
                         {"event": "end", "error": "ValueError: no"}]


def test_a_call_that_is_said_only_in_part(tmp_path):
    recorded(tmp_path, lambda rec: (rec.inputs(IDS), rec.inputs(IDS[:1], sequences=[3]), rec.tensor("x", IDS)), calls=1)
    assert [(line["event"], line.get("call"), line.get("skipped")) for line in lines(tmp_path)[1:]] == [
        ("call", 0, False), ("end", None, None), ("call", 1, True), ("end", None, None)]
    assert "positions" not in lines(tmp_path)[1] and lines(tmp_path)[3]["sequences"] == [3]
    assert lines(tmp_path)[2]["error"] is None


def test_tensors_lie_one_behind_the_other_after_the_headers_room(tmp_path):
    call, = recorded(tmp_path, lambda rec: [rec.tensor(f"t{n}", torch.full((n,), n, dtype=torch.int16))
                                            for n in (3, 5)])
    assert [entry.offset for entry in call.entries] == [8 + _ROOM, 8 + _ROOM + 6]
    data = (tmp_path / "rank0/call0.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") == _ROOM and len(data) == 8 + _ROOM + 16
    assert json.loads(data[8:8 + _ROOM])["t5 tensor  0"] == {"dtype": "I16", "shape": [5], "data_offsets": [6, 16]}
    assert load_file(tmp_path / "rank0/call0.safetensors")["t3 tensor  0"].tolist() == [3] * 3


def test_further_files_are_numbered_and_every_header_fits(tmp_path):
    (call,) = recorded(tmp_path, lambda rec: [rec.tensor("n" * 900 + str(n), torch.tensor(n)) for n in range(150)])
    names = list(dict.fromkeys(entry.file.name for entry in call.entries))
    assert names == ["call0.safetensors", *(f"call0.{n}.safetensors" for n in range(1, len(names)))] and len(names) > 2
    assert [entry.tensor().item() for entry in call.entries] == list(range(150))
    with record(tmp_path / "p", rank=0, world_size=1) as rec:
        rec.parameters({"w" * 900 + str(n): torch.tensor(n) for n in range(150)})
    parameters = read_recorded(tmp_path / "p").ranks[0].parameters.values()
    assert [entry.tensor().item() for entry in parameters] == list(range(150))
    assert (tmp_path / "p/rank0/parameters.1.safetensors").exists()


@pytest.mark.parametrize("limit, kept", [(16, ["a", "b", "again"]), (15, ["a", "again", "small"]), (8, ["a", "again"]),
                                         (7, ["small"]), (20, ["a", "b", "again", "small"]), (0, []), (None, [
                                             "a", "b", "again", "small"])])
def test_how_many_bytes_are_kept(tmp_path, limit, kept):
    """What is there already takes none; what is too large leaves room for what is smaller."""
    def run(rec):
        for name, tensor in (("a", torch.ones(2)), ("b", torch.zeros(2)), ("again", torch.ones(2)), ("small",
                                                                                                    torch.ones(1))):
            rec.tensor(name, tensor)
    (call,) = recorded(tmp_path, run, max_bytes=limit)
    assert [entry.name for entry in call.entries] == kept
    assert (call.left_out == ()) is (len(kept) == 4)


def test_bytes_are_counted_over_all_calls_and_the_parameters(tmp_path):
    with record(tmp_path, rank=0, world_size=1, max_bytes=12) as rec:
        rec.parameters({"w": torch.ones(1)})
        for n in range(3):
            rec.inputs([n])
            rec.tensor("x", torch.tensor(float(n)))
    rank = read_recorded(tmp_path).ranks[0]
    assert [len(call.entries) for call in rank.calls] == [1, 1, 0] and len(rank.parameters) == 1


@dataclass
class Partly:
    there: torch.Tensor
    never: torch.Tensor = field(init=False)


def test_a_field_that_was_never_set_is_none(tmp_path):
    (call,) = recorded(tmp_path, lambda rec: rec.tensor("x", Partly(torch.ones(2))))
    assert [entry.path for entry in call.entries] == ["there"]


@pytest.mark.parametrize("depth, kept", [(1, True), (7, True), (8, True), (9, False)])
def test_how_deep_is_looked(tmp_path, depth, kept):
    value = torch.ones(2)
    for _ in range(depth):
        value = [value]
    (call,) = recorded(tmp_path, lambda rec: rec.tensor("x", value))
    assert [entry.path for entry in call.entries] == [".".join("0" * depth)] * kept


@pytest.mark.parametrize("rank, size, fine", [(0, 1, True), (2, 3, True), (3, 3, False), (-1, 3, False), (0, 0, False)])
def test_ranks_count_from_0(tmp_path, rank, size, fine):
    if fine:
        with record(tmp_path / "r", rank=rank, world_size=size):
            assert (tmp_path / f"r/rank{rank}").is_dir()
        return
    with pytest.raises(RecordError, match=f"there is no rank {rank} of {size}; ranks count from 0 to world_size - 1"):
        record(tmp_path / "r", rank=rank, world_size=size)
    assert not (tmp_path / "r").exists()


def test_names_of_a_thousand_characters_and_no_more(tmp_path):
    (call,) = recorded(tmp_path, lambda rec: rec.tensor("é" * 1000, torch.ones(1)))
    assert call.entries[0].name == "é" * 1000
    with pytest.raises(RecordError, match="cannot be a name"):
        recorded(tmp_path / "b", lambda rec: rec.tensor("é" * 1001, torch.ones(1)))


def test_names_behind_a_prefix_and_without_wrappers(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    model._orig_mod = nn.Linear(2, 2)
    with record(tmp_path, rank=0, world_size=1) as rec:
        rec.parameters({"_orig_mod.a": torch.ones(1), "b._orig_mod.c": torch.ones(1), "my_orig_mod.d": torch.ones(1),
                        "e._orig_mod": torch.ones(1)}, "p")
        rec.parameters({"q": torch.ones(1)})
    assert set(read_recorded(tmp_path).ranks[0].parameters) == {"p.a", "p.b.c", "p.my_orig_mod.d", "p.e", "q"}


def test_nothing_hangs_on_a_model_after_the_recording(tmp_path):
    model = Toy()
    with record(tmp_path, rank=0, world_size=1) as rec:
        rec.watch(model, "m")
        assert len(model.head._forward_hooks) == len(model.head._forward_pre_hooks) == 1
        model(IDS)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_dtypes_name_in_a_file_is_safetensors_own():
    assert {DTYPES[getattr(torch, name)] for name in ("float32", "bfloat16", "int64", "bool", "uint8")} == {
        "F32", "BF16", "I64", "BOOL", "U8"} and len(set(DTYPES.values())) == len(DTYPES) == 13
