"""The case files: each is seen, named and mended; what is wrong is refused in words; runs are counted; it is sealed."""

import builtins
import dis
import inspect
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.faults import nothing_is_patched
from helpers.notebooks import read, solution_code, tagged
from helpers.solved_cases import Solved, no_runs, refused

from course import lesson
from course.cases import CASES, repairing
from course.cases.answering import check_what_and_why, check_where, kinds
from course.cases.case_file import NOWHERE, Bug, Trial, code_at, edited, engines_own, patches_at, places
from course.cases.sealed import CaseError
from course.judge import exercise, progress_file
from course.judge.words import NotYet
from course.lab.batch import FOLDER
from tplab.align import AlignError, Diagnosis, floors, hf_greedy
from tplab.checkpoint import open_checkpoint
from tplab.patch import applied, original

pytestmark = pytest.mark.pool

each_case = pytest.mark.parametrize("file", CASES.values(), ids=list(CASES))
KNOWN = list(places())


@pytest.fixture(scope="module")
def ckpt():
    return open_checkpoint("fable")


def answers(file):
    """A right answer: where, what, why."""
    return [*file.repair], list(file.kinds), next(why for why, wrong in file.why.items() if not wrong)


@each_case
def test_a_case_is_seen_named_and_mended_and_what_hides_it_is_refused(file, ckpt):
    """On two ranks, every fourth one on three; repairs that hide the bug by turns."""
    with repairing.one_thread_if_small(ckpt.config):
        solved = Solved(lesson.open_case(file.number, ckpt, tensor_parallel_size=3 - bool(file.number % 4)))
    assert not solved.wrong
    assert (solved.seen == NOWHERE) == (not file.bugs)
    assert len(file.false_repairs) >= 1
    assert all(re.search("another one is not|not right yet|the numbers are right|In production", said)
               for said in solved.hidden), solved.hidden
    assert nothing_is_patched()


@each_case
def test_wrong_answers_are_refused_in_words_and_why_is_asked_when_where_is_right(file, ckpt, capsys):
    """What can be chosen says much about the bug, so nobody must see it before the place is found."""
    case, (where, what, why) = lesson.open_case(file.number, ckpt), answers(file)
    wrong = [(place, what, why) for place in (*file.elsewhere, "gumbel_noise", "no_such_place", "")]
    for one in wrong:
        assert not case.close(*one, file.repair)
    case.choices()
    said = capsys.readouterr().out
    assert said.count("NOT YET") == len(wrong) and "why: asked when where is right" in said
    assert not [why for why in file.why if why in " ".join(said.split())] and "Traceback" not in said
    others = [kind for kind in kinds() if kind not in what]
    wrong = [(where, kind, why) for kind in (*others[:2], "")] + [(where, what)]
    wrong += [(where, what, wrong) for wrong, says in file.why.items() if says]
    for one in wrong:
        assert not case.close(*one)
    case.choices()
    said = capsys.readouterr().out
    assert said.count("NOT YET") == len(wrong) >= 5 and all(len(line) <= 110 for line in said.splitlines())
    assert all(why in " ".join(said.split()) for why in file.why)


@each_case
def test_a_case_file_is_complete_and_sealed_from_a_casual_look(file, ckpt):
    assert sum(not wrong for wrong in file.why.values()) == 1 and len(file.why) >= 3
    assert len(file.hints) >= 2 and all(one.endswith((".", "?")) for one in file.hints)
    assert file.report.endswith(".") and {*file.not_what} <= {*kinds()} - {*file.kinds}
    assert all(bug.place in KNOWN for bug in file.bugs) and set(file.elsewhere) <= set(KNOWN)
    for bug in file.bugs:
        assert all(original(target) is engines_own(bug.place) is not bug.wrong for target in places()[bug.place])
    with applied(*file.patches):
        innocent = {*KNOWN} - {bug.place for bug in file.bugs}
        assert not [place for place in innocent if "course." in code_at(place)], "an import that names the sealed file"
        for place in (bug.place for bug in file.bugs if file.name != "case_13"):  # there, an argument is the bug
            docstring = inspect.getdoc(engines_own(place)) or ""
            assert docstring.partition("\n")[0] in code_at(place) and "course." not in code_at(place), (
                "it can be told from the engine's own at sight")
    case = lesson.open_case(file.number, ckpt)
    seen = " ".join([str(case), *dir(case), *map(str, case.trial.options)])
    secrets = [bug.fault for bug in file.bugs] + [bug.place for bug in file.bugs] + list(file.kinds)
    assert not [one for one in secrets if one in seen]
    assert not [name for name in dir(case) if name.startswith("_")]
    assert not [op.file for log in case.align(logical=True).op_logs for op in log if "/tplab/" not in op.file]


def test_rounding_above_the_floor_is_no_reason_to_refuse_a_repair(ckpt, monkeypatch):
    """As on SmolLM2, where thirty layers' rounding passes the floor on some prompts, and no module is guilty."""
    monkeypatch.setitem(floors.RELATIVE, torch.float32, 1e-9)
    monkeypatch.setitem(floors.LOGITS_RELATIVE, torch.float32, 1e-9)
    monkeypatch.setitem(floors.LOGITS, torch.float32, 1e-9)
    monkeypatch.setattr(repairing, "usual", no_runs)
    case, file = lesson.open_case(5, ckpt), CASES["case_05"]
    assert not case.align(logical=True).ok and not refused(repairing.examine, case, file.repair, 1)
    assert "not right yet" in refused(repairing.examine, case, file.false_repairs[0], 1)


def test_runs_are_counted_and_end(ckpt, capsys):
    case = lesson.open_case(1, ckpt)
    report = case.align(logical=True)
    with case.broken():
        pass
    case.code("DecoderLayer.forward")
    assert case.runs_left == 5 and not report.patches and "def forward" in capsys.readouterr().out
    case.diagnose(report)
    case.hint()
    assert case.runs_left == 2 and capsys.readouterr().out.endswith(CASES["case_01"].hints[0][-20:] + "\n")
    assert case.generate(max_tokens=2, logical=True) and case.align(logical=True)
    with pytest.raises(CaseError, match=r"this run costs 1, and 0 of 8 runs are left: .* open the case again"):
        case.align()
    assert "Budget: 0 of 8 runs are left." in str(case) and nothing_is_patched()
    assert "Budget: 8 runs." in str(lesson.open_case(1, ckpt))


def test_generate_runs_on_another_number_of_ranks(ckpt):
    case = lesson.open_case(1, ckpt)
    alone, two = (case.generate(max_tokens=8, tensor_parallel_size=size, logical=True)[0] for size in (1, 2))
    assert alone == hf_greedy(ckpt, case.trial.prompts[0], 8) != two and case.runs_left == 6


def test_what_cannot_be_opened_is_said(ckpt):
    with pytest.raises(CaseError, match=rf"there is no case 99; there are 1 to {len(CASES)}"):
        lesson.open_case(99, ckpt)
    with pytest.raises(CaseError, match="did you mean 'RowParallelLinear.reduce'"):
        lesson.open_case(1, ckpt).code("RowParallelLinear.redcue")
    with pytest.raises(CaseError, match="tensor_parallel_size must be a whole number from 1 up"):
        lesson.open_case(1, ckpt, tensor_parallel_size=0)


@pytest.mark.parametrize("least, heads, wanted, ranks", [
    (1, 8, 1, 1), (2, 8, 1, 2), (4, 8, 4, 4), (4, 3, 1, None), (5, 8, 2, None), (5, 8, 6, 6)])
def test_a_case_is_opened_on_the_fewest_ranks_that_show_it(least, heads, wanted, ranks, ckpt):
    file = replace(CASES["case_01"], needs=lambda config, size: "" if size >= least else "too few")
    assert file.ranks_for(SimpleNamespace(num_heads=heads), wanted) == ranks
    assert "2 ranks, since with 1 nothing is wrong to be seen" in str(lesson.open_case(1, ckpt, tensor_parallel_size=1))


BUGS = (Bug("RowParallelLinear.reduce", lambda self: 1, "a sum", "missing"),
        Bug("mask_scores", lambda scores: scores, "a mask", "no_mask"))
FILE = replace(CASES["case_01"], bugs=BUGS, why={"right": "", "it is slow": "it is quick"}, elsewhere={
    "attend": "it attends to what it gets"},
    trials=lambda take: [Trial(f"trial {at} {take}", []) for at in range(3)])


@pytest.mark.parametrize("where, says", [
    (["RowParallelLinear.reduce", "mask_scores"], ""), ({"mask_scores", "RowParallelLinear.reduce"}, ""),
    ([], "where is not answered"), (["mask_scores", "mask_scores"], "(1 more to find)"), (KNOWN, "has one or two"),
    ("mask_scores", "mask_scores: yes, and that is not all: with this alone mended the engine is still wrong (1 more"),
    (["mask_scores", "attend"], "not attend: it attends to what it gets (mask_scores: yes)"),
    ("nowhere", "not nowhere: the engine is not right"), (torch.ones(2), "there is no function tensor([1., 1.])"),
    ("layers.0.mlp_act", "is a trace point; name the function that computes it"),
    ("Linear.reduce", "there is no function 'Linear.reduce'"), (3, "there is no function 3"),
    ("DecoderLayer.forward", "not DecoderLayer.forward: what it does with its inputs is right")])
def test_where(where, says):
    wrong = refused(check_where, FILE, where, KNOWN)
    assert bool(wrong) == bool(says) and says in wrong


@pytest.mark.parametrize("what, why, says", [
    (["a sum", "a mask"], "right", ""), (("a mask", "a sum"), "ri", "not in the same order"),
    ([], "", "what is not answered"),
    (["a sum"], "", "so is 'a sum'; the other bug is of another kind"), ("a ", "", "is none of the choices, or begins"),
    (["a sum", "a third"], "", "what is not 'a third'"), (["a sum", "a mask"], "", "why is not answered"),
    (["a sum", "a mask"], 1, "1 is no string"), (["a sum", "a mask"], "it is slow", "is not: it is quick")])
def test_what_and_why(what, why, says, monkeypatch):
    monkeypatch.setattr("course.cases.answering.kinds", lambda: ["a mask", "a sum", "a third"])
    wrong = refused(check_what_and_why, FILE, ["RowParallelLinear.reduce", "mask_scores"], what, why)
    assert bool(wrong) == bool(says) and says in wrong


@pytest.mark.parametrize("repair, says", [
    (None, "there is no repair"), ({}, "there is no repair"), (len, "there is no repair"),
    ({"DecoderLayer.forward": 3}, "a function of the engine is replaced by a function"),
    ({"DecoderLayer.forward": lambda self: self}, "but the replacement takes"),
    ({"DecoderLayer.forward": lambda self, hidden, cos, sin, context: 1 / 0}, "ZeroDivisionError"),
    ({"nowhere": len}, "a function of the engine is replaced by a function"),
    ({"no_such_place": len}, "there is no function 'no_such_place'")])
def test_what_is_no_repair_is_refused_in_words(ckpt, repair, says):
    assert says in refused(repairing.examine, lesson.open_case(1, ckpt), repair, 0)


def test_a_test_is_judged_by_itself_and_under_any_name(ckpt, capsys):
    file = CASES["case_09"]
    for repair in (file.cure, {"my_test": file.cure}):
        assert lesson.open_case(9, ckpt).close(*answers(file), repair), capsys.readouterr().out


WHOLE = dict.fromkeys(FILE.repair, len)


def case(heads=9, size=2, run=None, file=FILE):
    config = SimpleNamespace(num_heads=heads, num_layers=3, hidden_size=8, intermediate_size=8,
                             max_position_embeddings=99)
    return SimpleNamespace(checkpoint=SimpleNamespace(config=config), tensor_parallel_size=size, trial="reported",
                           _run=run, _file=file, _places=KNOWN)


def report(logs=(), **more):
    return SimpleNamespace(checkpoint=case().checkpoint, op_logs=[[0] * count for count in logs], **more)


@pytest.fixture
def runs(monkeypatch):
    """Every run of the judge; ``runs.wrong`` says which of them, by its number, is not what it should be."""
    made = SimpleNamespace(asked=[], wrong={}, reports={})

    def run(case, trial, patches, size, logical=False):
        made.asked.append((trial if isinstance(trial, str) else trial.says, patches, size, logical))
        if (number := len(made.asked) - 1) in made.wrong:
            raise NotYet(made.wrong[number])
        return made.reports.get(number, report([7]))

    monkeypatch.setattr(repairing, "_run", run)
    monkeypatch.setattr(repairing, "unseen", lambda ckpt, seed: seed)
    monkeypatch.setattr(repairing, "usual", lambda take, longest: [Trial(f"a usual run {take}", [])])
    return made


@pytest.mark.parametrize("heads, size, sizes", [(9, 2, [2, 4, 3, 1]), (2, 1, [1, 2])])
def test_a_repair_runs_as_reported_then_on_fresh_tokens_with_every_number_of_ranks(heads, size, sizes, runs):
    said = repairing.examine(case(heads, size), WHOLE, 100)
    mended = (*FILE.patches, *patches_at(WHOLE))
    first = [("reported", mended, size, False), *((f"trial {at} 100", mended, size, False) for at in range(3)),
             ("a usual run 100", mended, size, True)]
    assert runs.asked == first + [(f"trial 0 {100 + at}", mended, more, True) for at, more in enumerate(sizes[1:], 1)]
    assert said.endswith(f"fresh tokens with {', '.join(map(str, sorted(sizes)))} ranks.")


@pytest.mark.parametrize("number, says", [
    (0, "the reported run is not right yet: q is off."),
    (1, "the reported run is right now; another one is not, on 2 ranks (trial 0 5): q is off."),
    (7, "another one is not, on 1 rank (trial 0 8): q is off.")])
def test_what_is_still_wrong_is_said_with_the_run_in_which_it_is(number, says, runs):
    runs.wrong[number] = "q is off."
    assert refused(repairing.examine, case(), WHOLE, 5).endswith(says) and len(runs.asked) == number + 1


@pytest.mark.parametrize("repair", [{"mask_scores": len}, {"attend": len}, {**WHOLE, "attend": len}])
def test_a_repair_replaces_what_is_wrong_and_nothing_else(repair, runs):
    assert refused(repairing.examine, case(), repair, 5) == (
        f"the numbers are right, and the repair replaces {' and '.join(repair)}. What is wrong, "
        "RowParallelLinear.reduce and mask_scores, must be replaced, and nothing else")


def test_a_repair_may_not_cost_a_collective_more(runs):
    runs.reports = {0: report([7, 7]), 3: report([7, 9])}
    assert refused(repairing.examine, case(), WHOLE, 5).startswith(
        "the numbers are right, and a forward pass has 2 collectives more than it needs")


@pytest.mark.parametrize("scales, says", [
    ("channel_scales(source[rows.start:rows.stop])", ""),
    ("channel_scales(source[:])[rows.start:rows.stop]", "a rank read")])
def test_rows_may_be_read_twice_and_not_whole_tensors(scales, says, ckpt, monkeypatch):
    monkeypatch.setattr(repairing, "usual", no_runs)
    mended = exercise.edited(CASES["case_04"].bugs[0].wrong, f"channel_scales(source[:len(rows)]) -> {scales}")
    said = refused(repairing.examine, lesson.open_case(4, ckpt), {"merged_shard": mended}, 1)
    assert bool(said) == bool(says) and says in said


@pytest.mark.parametrize("found, says", [
    (Diagnosis(None, "fine"), ""),
    (Diagnosis("other", "another bug", "layers.0.q"), "it is as with a known bug: another bug"),
    (Diagnosis("missing", "the sum is missing", "layers.0.mlp"), "layers.0.mlp is not what it should be"),
    (Diagnosis("missing", "A sum is missing. At layers.0.mlp, 3 of 9 rows differ, by up to 0.8 times a row's largest "
               "value. The lab's engine gives the same.", "layers.0.mlp"),
     "At layers.0.mlp, 3 of 9 rows differ, by up to 0.8 times a row's largest value"),
    (Diagnosis(None, "who knows", "layers.0.q"), "layers.0.q is not what it should be")])
def test_its_own_bugs_name_is_not_given_away(found, says, monkeypatch):
    monkeypatch.setattr(repairing, "diagnose", lambda report: found)
    made = case(run=lambda *args, **options: report(ok=found.ok, guilty=["layers.0.q"], recording=SimpleNamespace(
        contradictions=[])))
    assert refused(repairing._run, made, Trial("", []), (), 3) == says


def test_a_step_may_not_compute_more_than_its_budget(ckpt):
    admit = engines_own("Scheduler._admit")

    def all_at_once(self, sequence, budget):
        return admit(self, sequence, 100)

    assert "a step computes 9 tokens, and max_num_batched_tokens is 1" in refused(
        repairing.examine, lesson.open_case(8, ckpt), {"Scheduler._admit": all_at_once}, 1)


def test_a_repair_is_tried_over_the_sealed_engine(ckpt):
    case, file = lesson.open_case(10, ckpt), CASES["case_10"]
    (load, right), (mask, _) = file.repair.items()
    prompts = [ckpt.tokenizer()("Once there was a fox.").input_ids]
    assert case.align(prompts, repair={load: right}, logical=True).ok
    assert case.align_decode(repair={load: right}, logical=True).first_divergence.name == "layers.0.attn"
    assert case.align_decode(repair=file.repair, logical=True).ok and case.runs_left == file.budget - 3
    with pytest.raises(CaseError, match="no function 'QKVParallelLinear.lode' in the engine's core; did you mean"):
        case.align(repair={"QKVParallelLinear.lode": right})
    with pytest.raises(AlignError, match="too few to decode"):
        case.align_decode([[1, 2]])
    assert case.runs_left == file.budget - 3, "a call that cannot be made costs nothing"


def test_a_solved_case_is_kept(ckpt, tmp_path, monkeypatch, capsys, runs):
    monkeypatch.setenv("TPLAB_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setitem(CASES, "case_01", file := replace(CASES["case_01"], trials=FILE.trials))
    case = lesson.open_case(1, ckpt)
    runs.wrong[0] = "q is off."
    assert not case.close(*answers(file), file.repair)
    assert "case_01" not in progress_file.load()
    assert case.close(*answers(file), file.repair)
    assert progress_file.load()["case_01"]["solved"].startswith("20")
    assert re.search(r"11 +case_01 +20\d\d-", str(lesson.progress()))
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1] in "RPN"]
    assert said == ["RIGHT", "NOT", "RIGHT", "PASS"]


def test_a_case_follows_the_engine_or_says_that_it_cannot():
    changed = edited("mask_scores", "masked_fill(mask, -> masked_fill(~mask,")
    scores, mask = torch.zeros(1, 1, 2, 2), torch.tensor([[[[False, True], [False, False]]]])
    assert changed(scores, mask).isinf().sum() == 3 and engines_own("mask_scores")(scores, mask).isinf().sum() == 1
    assert "masked_fill(~mask" in inspect.getsource(changed)
    with pytest.raises(ValueError, match="mask_scores has no 'nowhere' to change"):
        edited("mask_scores", "nowhere -> there")


@each_case
def test_a_copy_of_the_code_at_a_place_runs_below_its_imports(file):
    with applied(*file.patches):
        for place in [bug.place for bug in file.bugs] + [*file.elsewhere]:
            space: dict = {}
            exec(code_at(place), space)
            (own,) = [one for one in map(inspect.unwrap, space.values())
                      if inspect.isfunction(one) and one.__globals__ is space]
            assert not {*globals_of(own.__code__)} - space.keys() - vars(builtins).keys()


@each_case
def test_a_solution_runs_in_an_empty_cell_and_is_what_the_case_calls_right(file):
    cells = tagged(read(FOLDER / "11_case_files.ipynb"), "solution")
    space: dict = {}
    exec(solution_code(cells[file.number - 1]), space)
    assert {*space["repair"]} == {*file.repair} and all(map(callable, space["repair"].values()))
    assert space["where"] and space["what"] and space["why"]
    own = [one for one in space.values() if inspect.isfunction(one) and one.__globals__ is space]
    assert not {name for one in own for name in globals_of(one.__code__)} - space.keys() - vars(builtins).keys()


def globals_of(code):
    """The global names that code reads, also in the functions inside it."""
    inner = [name for one in code.co_consts if inspect.iscode(one) for name in globals_of(one)]
    return [*inner, *(one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")]
