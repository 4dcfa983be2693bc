"""The same weights under another configuration; an error said in three lines."""

import pytest

from tplab import lesson
from tplab.align import align
from tplab.checkpoint import CheckpointError, open_checkpoint


def test_twice_as_many_heads_of_half_the_size_agree_with_hugging_face():
    fable = open_checkpoint("fable")
    with lesson.changed_config(fable, num_attention_heads=16, num_key_value_heads=4, head_dim=8) as halved:
        assert (halved.config.num_heads, halved.config.num_kv_heads, halved.config.head_dim) == (16, 4, 8)
        assert align(halved, list(range(5, 14)), logical=True).ok
    assert fable.config.num_heads == 8
    with pytest.raises(CheckpointError, match="it was there when the checkpoint was opened"):
        align(halved, [5, 6], logical=True)


def test_a_brief_error_is_the_learners_own_line(capsys):
    with lesson.shown_error(brief=True):
        raise KeyError("cos")
    printed = capsys.readouterr().out
    assert printed.startswith("KeyError: 'cos'\nat your line ") and printed.count("\n") == 2
