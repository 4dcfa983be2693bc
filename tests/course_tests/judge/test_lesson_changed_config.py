"""The same weights under another configuration; an error said in three lines."""

import json

from helpers.checkpoints import make_checkpoint

from course import lesson
from tplab.align import align
from tplab.checkpoint import open_checkpoint


def test_twice_as_many_heads_of_half_the_size_agree_with_hugging_face():
    fable = open_checkpoint("fable")
    with lesson.changed_config(fable, num_attention_heads=16, num_key_value_heads=4, head_dim=8) as halved:
        assert (halved.config.num_heads, halved.config.num_kv_heads, halved.config.head_dim) == (16, 4, 8)
        assert align(halved, list(range(5, 14)), logical=True).ok
    assert fable.config.num_heads == 8


def test_a_checkpoint_that_was_opened_by_a_relative_path_is_found_and_nothing_stays(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m", layers=1)
    monkeypatch.chdir(tmp_path)
    ckpt = open_checkpoint("m")
    with lesson.changed_config(ckpt, rms_norm_eps=0.5, new=[1]) as changed:
        folder = changed.folder
        config = json.loads((folder / "config.json").read_text())
        assert config["rms_norm_eps"] == 0.5 and config["new"] == [1] and config["num_hidden_layers"] == 1
        with changed.reader() as reader:
            assert reader["model.norm.weight"][:].shape == (32,)
        assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert not folder.exists()


def test_a_brief_error_is_the_learners_own_line(capsys):
    with lesson.shown_error(brief=True):
        raise KeyError("cos")
    printed = capsys.readouterr().out
    assert printed.startswith("KeyError: 'cos'\nat your line ") and printed.count("\n") == 2
