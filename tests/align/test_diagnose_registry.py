"""The registry of hypotheses: a new one touches one file, the order of asking is that of the files and their lines."""

import sys

import pytest
from helpers.faults import prompts

from tplab.align import align, diagnose
from tplab.align.diagnose.registry import COST, ERROR, hypotheses, hypothesis
from tplab.align.points import LAYER_POINTS
from tplab.patch import Patch, original

SPLIT = "tplab.shard.linear.QKVParallelLinear.split_heads"

NEW = '''
from tplab.align.diagnose.registry import hypothesis

@hypothesis("v")
def doubled(case):
    """Is v twice what it should be?"""
    if case.fits(case.ours("v"), 2 * case.reference("v")):
        return case.diagnosis({name!r}, "v is doubled.")
'''


@pytest.fixture
def new_file(tmp_path, monkeypatch):
    """Writes one more file into the folder of hypotheses; it is gone after the test."""
    package = sys.modules["tplab.align.diagnose"]
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    before = set(sys.modules)

    def write(theme, name):
        (tmp_path / f"{theme}.py").write_text(NEW.format(name=name))

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("tplab.align.diagnose."):
            del sys.modules[name]


def doubled_v():
    def split_heads(self, qkv):
        q, k, v = original(SPLIT)(self, qkv)
        return q, k, 2 * v

    return align("fable", prompts(768), patches=[Patch(SPLIT, split_heads)], logical=True)


@pytest.mark.parametrize("theme", ["aardvark", "zebra"])
def test_a_hypothesis_in_one_new_file_is_asked(new_file, theme):
    report = doubled_v()
    assert diagnose(report).sentence.startswith("Unknown cause")
    new_file(theme, None)
    assert diagnose(report).sentence == "v is doubled."


def test_the_first_file_in_the_alphabet_names_the_fault_and_the_others_its_lookalikes(new_file):
    new_file("zebra", "twice")
    new_file("aardvark", "v_doubled")
    asked = [one.__module__.rpartition(".")[2] for one in hypotheses("v")]
    assert (asked[0], asked[-1]) == ("aardvark", "zebra")
    assert diagnose(doubled_v()).names == ("v_doubled", "twice")


def test_what_describes_without_a_name_has_no_lookalikes(new_file):
    new_file("aardvark", None)
    new_file("zebra", "twice")
    assert diagnose(doubled_v()).names == ()


@pytest.mark.parametrize("subject", ["embed", *LAYER_POINTS, "norm", "logits", COST, ERROR])
def test_they_are_asked_file_by_file_and_line_by_line(subject):
    for last in (False, True):
        asked = [(one.__module__, one.__code__.co_firstlineno) for one in hypotheses(subject, last)]
        assert asked == sorted(asked) and len(set(asked)) == len(asked) and (asked or last)


def test_what_fits_much_is_asked_last(new_file):
    asked = [one.__name__ for one in hypotheses("logits", last=True)]
    assert "unrelated_head" in asked and "unrelated_head" not in [one.__name__ for one in hypotheses("logits")]


@pytest.mark.parametrize("subjects", [(), ("q_rop",), ("v", "layers.0.v")])
def test_a_hypothesis_about_what_there_is_not_would_never_be_asked(subjects):
    with pytest.raises(ValueError, match="a hypothesis is about some of attn, cost, embed, error, "):
        hypothesis(*subjects)
