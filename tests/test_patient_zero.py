"""The engine of notebook 09: every defect of the case notes shows its own symptom, and without them it is right."""

import ast
import json
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.patient_zero import CURES, examine, gradients, record_run, rest_to_the_last, turned_along_heads

from course import lesson
from course.exercises import nb09
from course.lab.batch import FOLDER
from tplab import open_checkpoint
from tplab.align import check, hf_greedy
from tplab.align.reference import hf_model
from tplab.checkpoint.prompts import default_prompt
from tplab.pool import shared_pool
from tplab.ranks import RankError

pytestmark = pytest.mark.pool

PROMPT = default_prompt("fable")
GLOBAL = "attention.QKVParallelLinear"  # the cure with global sizes, which refuses what `share` loses


@pytest.fixture(scope="module")
def ckpt():
    return open_checkpoint("fable")


@pytest.fixture(scope="module")
def ids(ckpt):
    return ckpt.tokenizer()(PROMPT).input_ids


def hf_logits(ckpt, ids):
    with torch.inference_mode():
        return hf_model(ckpt, torch.float32)(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def truth(ckpt, ids):
    return hf_logits(ckpt, ids), hf_greedy(ckpt, ids, 12)


@pytest.fixture(scope="module")
def without(ckpt, ids):
    """without(name, ranks): what each rank sees when all is cured but ``name``."""
    seen = {}

    def run(*names, ranks=2):
        if (names, ranks) not in seen:
            cures = {name: cure for name, cure in CURES.items() if name not in names}
            seen[names, ranks] = shared_pool(ranks).run(examine, ckpt.folder, ids, cures)
        return seen[names, ranks]

    return run


def distance(found, wanted):
    return (found - wanted).abs().max().item()


@pytest.mark.parametrize("ranks", [1, 3])
def test_sick_it_writes_one_token_for_ever_and_calls_itself_well(ckpt, ids, ranks):
    for seen in shared_pool(ranks).run(examine, ckpt.folder, ids, {}):
        assert seen.logits.isnan().any()
        assert seen.text == [0] * 12
        assert seen.self_test.endswith(f"over {ranks} ranks works!")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_cured_it_is_hugging_face(without, truth, ranks):
    logits, text = truth
    for seen in without(ranks=ranks):
        assert distance(seen.logits, logits) < 1e-4
        assert seen.text == text
        assert seen.self_test == "agrees with Hugging Face"


@pytest.mark.parametrize("model_type, options", [
    ("llama", {"heads": 9, "kv_heads": 3, "hidden": 36, "tie": True, "attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"heads": 7, "kv_heads": 1, "hidden": 28}),
    ("mistral", {"heads": 6, "kv_heads": 6, "hidden": 36, "rope": "yarn"}),
    ("qwen2", {"heads": 14, "kv_heads": 2, "hidden": 42, "head_dim": 6, "tie": True, "shards": 2})])
def test_cured_it_runs_the_other_architectures_with_uneven_heads(tmp_path, model_type, options):
    ckpt, ids = open_checkpoint(make_checkpoint(tmp_path / "m", model_type, **options)), [5, 60, 3, 3, 17, 2, 41]
    for ranks in (2, 3):
        for seen in shared_pool(ranks).run(examine, ckpt.folder, ids, CURES):
            assert distance(seen.logits, hf_logits(ckpt, ids)) < 1e-4
            assert seen.text == hf_greedy(ckpt, ids, 12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_additive_mask_makes_nan(without, ranks):
    seen = without("attention.apply_causal_mask", ranks=ranks)[0]
    assert seen.logits.isnan().all() and seen.text == [0] * 12


@pytest.mark.parametrize("ranks", [1, 2])
def test_cut_along_dim_1_is_wrong_on_one_rank_too_and_no_shape_shows_it(without, truth, ranks):
    seen = without("linear.shard_weight", ranks=ranks)[0]
    assert distance(seen.logits, truth[0]) > 1 and seen.text != truth[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_written_by_column_is_wrong_on_one_rank_too(without, truth, ranks):
    seen = without("linear.write_shard", ranks=ranks)[0]
    assert distance(seen.logits, truth[0]) > 1 and seen.text != truth[1]


def test_a_mode_inside_the_layers_changes_no_number_and_takes_the_gradients(ckpt, ids, without):
    assert torch.equal(without("linear.apply_weight")[0].logits, without()[0].logits)
    (seen,) = shared_pool(1).run(lesson.with_cures, {}, gradients, ckpt.folder, ids)
    (cured,) = shared_pool(1).run(lesson.with_cures, CURES, gradients, ckpt.folder, ids)
    assert not seen["layers.0.self_attn.qkv_proj.weight"] and all(cured.values())


def test_swallowed_exception_is_a_model_without_positions(without, truth):
    seen = without("attention.apply_rope")[0]
    assert distance(seen.logits, truth[0]) > 1 and seen.text != truth[1]


def test_fallback_loses_the_head(without, truth):
    right, wrong = without()[0], without("weight_loader.load_state_dict")[0]
    assert distance(wrong.hidden, right.hidden) == 0
    assert distance(wrong.logits, truth[0]) > 1
    assert wrong.head.std() == pytest.approx(0.02, rel=0.05)


def test_cache_that_is_not_read_gives_the_same_text(without, truth, ids):
    right, wrong = without()[0], without("model.TensorParallelModel.generate")[0]
    assert wrong.text == right.text == truth[1]
    assert right.tokens == [len(ids)] + [1] * 11
    assert wrong.tokens == list(range(len(ids), len(ids) + 12))


def test_repeated_heads_in_the_cache_fail_as_soon_as_it_is_read(without):
    right, wrong = without()[0], without("attention.extend_cache")[0]
    assert wrong.cache_bytes == 4 * right.cache_bytes  # 8 query heads, 2 KV heads
    assert "Sizes of tensors must match" in wrong.text
    masked = without("attention.extend_cache", "model.TensorParallelModel.generate")[0]
    assert masked.text == right.text, "a cache that is not read shows nothing"


def every_head_on_every_rank(num_heads, num_kv_heads):
    return 0, num_kv_heads, nb09.linear.share(num_heads)[1] // num_kv_heads


def one_head_too_many(num_heads, num_kv_heads):
    first, count, repeats = nb09.kv_share(num_heads, num_kv_heads)
    return first, count + 1, torch.cat([repeats, repeats[:1] * 0])


def repeats_as_a_list(num_heads, num_kv_heads):
    first, count, repeats = nb09.kv_share(num_heads, num_kv_heads)
    return first, count, repeats.tolist()


def no_kv_head(num_heads, num_kv_heads):
    first, count = nb09.linear.share(num_heads)
    start, stop = (head // (num_heads // num_kv_heads) for head in (first, first + count - 1))
    return start, stop - start, torch.tensor([4] * (stop - start))


def a_share_of_the_kv_heads_where_they_divide(num_heads, num_kv_heads):
    if num_kv_heads % nb09.linear.tp_size():
        return nb09.kv_share(num_heads, num_kv_heads)
    return *nb09.linear.share(num_kv_heads), num_heads // num_kv_heads


@pytest.mark.parametrize("cure, heads, said", [
    (a_share_of_the_kv_heads_where_they_divide, (8, 2), ""), (a_share_of_the_kv_heads_where_they_divide, (8, 4), ""),
    (lambda *heads: (torch.tensor(0), 1, 4), (8, 2), "the first KV head is a tensor [] of torch.int64"),
    (one_head_too_many, (8, 2), "on 2 ranks, rank 0 holds the KV heads [0, 1], and its query heads read only [0]"),
    (repeats_as_a_list, (8, 2), "is a list, and repeat_interleave takes a number or a tensor"),
    (nb09.kv_share, (8, 2), ""), (nb09.kv_share, (9, 3), ""), (nb09.linear.kv_share, (6, 6), ""),
    (lambda *heads: (0, 1), (8, 2), "it returns 2 values, and should return three"),
    (lambda *heads: None, (8, 2), "it returns None, and should return three"),
    (nb09.linear.kv_share, (8, 2), "on 3 ranks, rank 1's query heads read the KV heads [1, 1, 1], and [0, 1, 1] is"),
    (every_head_on_every_rank, (9, 3), "on 2 ranks, rank 0's query heads read the KV heads [0, 1, 2], and [0, 0, 0, 1"),
    (lambda *heads: nb09.kv_share(*heads) if torch.distributed.get_rank() < 4 else None, (8, 2), ""),
    (no_kv_head, (8, 2), "on 2 ranks, rank 0 holds no KV head"),
    (lambda *heads: 1 // (nb09.linear.tp_size() - 2), (8, 2), "on 2 ranks, rank 0: ZeroDivisionError")])
def test_the_first_rank_whose_share_of_kv_heads_is_wrong_is_named(cure, heads, said):
    found = nb09.wrong_share(cure, SimpleNamespace(num_heads=heads[0], num_kv_heads=heads[1]))
    assert said in found and bool(said) == bool(found), found


def test_sizes_divided_and_multiplied_cancel_only_where_heads_divide(without, truth):
    assert distance(without("linear.share")[0].logits, truth[0]) < 1e-4
    for ranks, heads in ((2, 8), (3, 6), (4, 8)):
        assert sum(seen.heads for seen in without("linear.share", GLOBAL, ranks=ranks)) == heads
    assert distance(without("linear.share", GLOBAL, ranks=3)[0].logits, truth[0]) > 1


def test_kv_heads_without_a_rule_give_one_query_head_the_wrong_one(without, truth):
    assert distance(without("linear.kv_share")[0].logits, truth[0]) < 1e-4
    right, wrong = without(ranks=3), without("linear.kv_share", ranks=3)
    assert distance(wrong[0].logits, truth[0]) > 1
    differs = [(a.attention != b.attention).any(0).view(-1, 16).any(1).tolist() for a, b in zip(right, wrong)]
    assert differs == [[False] * 3, [True, False, False], [False] * 2]  # query head 3


def test_full_state_dict_stays_on_every_rank(without, ckpt):
    whole = 4 * sum(t.numel() for t in hf_model(ckpt, torch.float32).parameters())
    for right, wrong in zip(without(), without("weight_loader.load_weights")):
        assert right.parameter_bytes == wrong.parameter_bytes and right.kept_bytes == 0
        assert wrong.kept_bytes == whole, "tied: the head and the embedding are one tensor"


def test_head_is_computed_whole_on_every_rank(without, ckpt):
    config = ckpt.config
    head = 4 * config.vocab_size * config.hidden_size
    for right, wrong in zip(without(), without("linear.LMHead")):
        assert wrong.parameter_bytes - right.parameter_bytes == head // 2
        assert wrong.text == right.text


def test_self_test_compares_nothing(without, ckpt, ids):
    assert without("model.TensorParallelModel.self_test")[0].self_test.endswith("works!")
    compares = {"model.TensorParallelModel.self_test": CURES["model.TensorParallelModel.self_test"]}
    (seen,) = shared_pool(1).run(examine, ckpt.folder, ids, compares)
    assert seen.self_test == "WRONG, largest difference nan"


def test_sizes_are_global_and_lost_heads_are_refused(ckpt, ids, without):
    assert torch.equal(without(GLOBAL, ranks=3)[0].logits, without(ranks=3)[0].logits)
    with pytest.raises(RankError, match="the ranks hold 6 of 8 query heads"):
        without("linear.share", ranks=3)


MASK, CUT, WRITE, ROTATE, HEAD, *_ = ((name,) for name in CURES)
UNREAD = ("model.TensorParallelModel.generate",)


# By names; what has none is said in words: heads that no rank holds, or that are not those its query heads read.
UNKNOWN = [()] * 3  # q, k and v: two bugs in one matrix hide each other
ROPE = ("rope_missing", "rope_swallowed")
LOST = ["Query heads", "6–7 on no rank"]
READ = ["Key heads", "Value heads", "rank 1 holds 1, but its query heads read 0–1"]


@pytest.mark.parametrize("sick, ranks, verdict, names, words", [
    ((), 3, "clean", [], []), (tuple(CURES), 3, "bug", [(), *UNKNOWN, ROPE, ("nan_mask",)], LOST),
    (CUT + ROTATE + HEAD + UNREAD, 2, "bug", [("shard_dim1",), ROPE, ("head_random",)], []),
    (MASK + UNREAD, 1, "bug", [("nan_mask",)], []), (WRITE, 2, "bug", [("qkv_written_by_column",)], []),
    (("attention.extend_cache",), 2, "bug", [], ["stopped: ", "RuntimeError: Sizes of tensors",
                                                 "in layers.0.self_attn.attn"]),
    (("linear.share", GLOBAL), 3, "bug", [()], LOST),
    (("linear.kv_share",), 3, "bug", [(), ()], READ), (("linear.LMHead",), 2, "clean", [], [])])
def test_what_the_check_says(ckpt, ids, tmp_path, sick, ranks, verdict, names, words):
    cures = {name: cure for name, cure in CURES.items() if name not in sick}
    lesson.caught(shared_pool(ranks).run, record_run, ckpt.folder, ids, cures, tmp_path / "run")
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == verdict, report.summary()
    assert not [word for word in words if word not in report.summary()], report.summary()
    assert [one.names for one in report.diagnoses] == names, report.summary()
    assert report.summary().count("gives the same rows") == sum(one not in ((), ("head_random",)) for one in names)
    assert len(report.recording.contradictions) == names.count(()) - sum(
        one.sentence.startswith("Unknown cause") for one in report.diagnoses)


@pytest.mark.parametrize("sick, said", [("linear.kv_share", ["Key heads", "Value heads"]), ("", [])])
def test_a_wrong_copy_of_a_kv_head_is_told_where_heads_are_not_dealt_out_by_the_plan(ckpt, ids, tmp_path, sick, said):
    """2, 2 and 4 query heads: rank 1 reads KV head 0, and holds 1."""
    cures = {name: cure for name, cure in CURES.items() if name not in (sick, GLOBAL)}
    cures["linear.share"] = rest_to_the_last
    shared_pool(3).run(record_run, ckpt.folder, ids, cures, tmp_path / "run")
    report = check(tmp_path / "run", ckpt)
    assert [one.sentence for one in report.diagnoses] == [
        f"{what} are dealt out wrongly: by their sizes, ranks 0 and 1 hold head 0, and their numbers differ."
        for what in said], report.summary()
    assert report.verdict == ("bug" if said else "clean")


def test_the_module_that_an_error_ended_is_named_not_the_one_that_was_entered_last(ckpt, ids, tmp_path):
    cures = CURES | {"attention.apply_rope": turned_along_heads}
    lesson.caught(shared_pool(2).run, record_run, ckpt.folder, ids, cures, tmp_path / "run")
    (stopped, *_) = check(tmp_path / "run", ckpt).stopped
    assert "RuntimeError: The size of tensor a" in stopped and stopped.endswith("in layers.0.self_attn.rotary_emb")


def test_shapes_of_the_rotation_do_not_broadcast():
    from patient_zero import attention

    q, k, cos = torch.randn(1, 4, 7, 8), torch.randn(1, 1, 7, 8), torch.randn(1, 7, 8)
    with pytest.raises(RuntimeError, match="must match"):
        attention.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, cos)
    assert attention.apply_rope(lambda x, positions: (cos, cos), None, q, k) == (q, k)


@pytest.mark.parametrize("change, words", [({"model_type": "gpt2"}, "not 'gpt2'"),
                                           ({"hidden_act": "gelu"}, "gelu"),
                                           ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding")])
def test_what_it_cannot_run_is_refused_by_a_sentence(tmp_path, change, words):
    import patient_zero

    folder = make_checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=words):
        patient_zero.load(folder)


def test_what_the_notebook_goes_on_with_while_the_exercise_is_open_cures_as_well(ckpt, ids, truth):
    for seen in shared_pool(3).run(examine, ckpt.folder, ids, CURES | {"linear.kv_share": nb09.kv_share}):
        assert distance(seen.logits, truth[0]) < 1e-4 and seen.text == truth[1]


def test_it_knows_nothing_of_the_lab():
    files = sorted((FOLDER / "patient_zero").glob("*.py"))
    imported = {alias.name if isinstance(node, ast.Import) else node.module
                for file in files for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    assert {name.split(".")[0] for name in imported} <= {"torch", "transformers", "safetensors", "patient_zero",
                                                         "pathlib", "sys"}


def test_lost_heads_are_told_from_copies_in_the_cache(tmp_path):
    """9 query and 3 KV heads over 2 ranks, cut as if they divided: no name that is not true."""
    small = open_checkpoint(make_checkpoint(tmp_path / "m", "llama", heads=9, kv_heads=3, hidden=36))
    cures = {name: cure for name, cure in CURES.items() if name not in ("linear.share", "linear.kv_share", GLOBAL)}
    shared_pool(2).run(record_run, small.folder, [1, 2, 3, 4, 5, 6], cures, tmp_path / "run")
    report = check(tmp_path / "run", small)
    named = [one.names for one in report.diagnoses if one.fault]
    assert named == [("vocab_rows_missing",)] and len(report.recording.contradictions) == 4, report.summary()
