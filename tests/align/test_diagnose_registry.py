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


def test_what_is_asked_at_each_point_in_this_order():
    asked = {subject: [one.__name__ for one in hypotheses(subject)]
             for subject in ("embed", *LAYER_POINTS, "norm", "logits", COST, ERROR)}
    assert {subject: names for subject, names in asked.items() if names} == {
        "embed": ["offset_not_subtracted", "rows_in_other_orders"],
        "q": (rows := ["fused_cut_as_one_block", "offset_divided_twice", "cut_along_dim1", "rows_in_other_places"]),
        "k": (kv := ["k_and_v_exchanged", "first_kv_rows", "replica_by_modulo", *rows]), "v": kv,
        "q_rope": (rope := ["not_rotated", "rotated_in_pairs", "rotated_by_head", "default_theta", "scaling_ignored",
                            "other_positions"]), "k_rope": rope,
        "attn": ["zero_times_infinity", "sees_the_future", "copies_taken_for_heads", "other_kv_heads", "stale_table",
                 "written_too_early", "shared_without_parent"],
        "o_partial": ["bias_on_every_rank"], "mlp_partial": ["bias_on_every_rank"],
        "o_proj": ["not_reduced"], "mlp": ["not_reduced"],
        "logits": ["empty_head", "ranks_exchanged", "unrelated_head"],
        COST: ["read_too_much", "ranks_drew_differently", "tokens_computed_again", "stale_table_without_harm",
               "blocks_not_released"],
        ERROR: ["different_collectives", "still_running", "standstill", "strict_checks", "one_rank_failed", "refused"],
    }


@pytest.mark.parametrize("subjects", [(), ("q_rop",), ("v", "layers.0.v")])
def test_a_hypothesis_about_what_there_is_not_would_never_be_asked(subjects):
    with pytest.raises(ValueError, match="a hypothesis is about some of attn, cost, embed, error, "):
        hypothesis(*subjects)
