"""Every fault that shows in a forward pass: red, where it says, far above the floor, named by the diagnosis, gone
after.
"""

import pytest
from helpers import turns
from helpers.checkpoints import make_checkpoint
from helpers.faults import CASES, case_checkpoint, models_where, nothing_is_patched, over_floor, prompts
from helpers.recorded import record_lab

from tplab.align import align, align_decode, check, diagnose
from tplab.align.floors import RELATIVE
from tplab.checkpoint import open_checkpoint
from tplab.faults import MUSEUM, SEED, WING, fault
from tplab.patch import Patch

FORWARD = [name
           for name, one in MUSEUM.items() if one.shows_in == "forward" and one.first_point not in ("load", "error")]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return case_checkpoint(request.param, tmp_path_factory.mktemp("faults")), CASES[request.param]


@pytest.mark.parametrize("at, name", [*enumerate(name for name in FORWARD if name not in WING)])
def test_it_shows_where_it_says_and_is_named(at, name, tmp_path):
    """In the models by turns."""
    ((ckpt, tp),) = models_where(name, at, tmp_path, count=1)
    report = align(ckpt, prompts(ckpt.config.vocab_size), tensor_parallel_size=tp, patches=[fault(name)], logical=True)
    assert report.first_divergence is not None, "the engine does not notice"
    assert report.first_divergence.name == fault(name).first_point
    assert over_floor(report) >= 1000
    diagnosis = diagnose(report)
    assert name in diagnosis.names, diagnosis
    assert nothing_is_patched()


def test_the_engine_is_clean_and_found_healthy(case):
    ckpt, tp = case
    report = align(ckpt, prompts(ckpt.config.vocab_size), tensor_parallel_size=tp, logical=True)
    assert report.ok and diagnose(report).ok


@pytest.mark.parametrize("at, options, tp", [
    (0, {"model_type": "qwen2"}, 1), (1, {"model_type": "llama", "heads": 4, "kv_heads": 1, "attention_bias": True}, 2),
    (0, {"model_type": "llama", "heads": 6, "kv_heads": 6, "rope": "dynamic"}, 2),
    (1, {"model_type": "llama", "heads": 6, "kv_heads": 2, "rope": "linear", "tie": True}, 3),
], ids=["one rank", "one KV head", "a KV head each", "a KV head on two ranks"])
def test_a_fault_shows_exactly_where_it_names_no_reason_against_it(at, options, tp, tmp_path):
    """Half of the faults in each model, so that each fault is in two."""
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", **options, hidden=48))
    for name in FORWARD if turns.ALL else FORWARD[at::2]:
        report = align(ckpt, prompts(67), tensor_parallel_size=tp, patches=[fault(name)], logical=True)
        assert report.ok == bool(fault(name).why_not(ckpt.config, tp)), (name, fault(name).why_not(ckpt.config, tp))


@pytest.mark.pool
@pytest.mark.parametrize("name", ["nan_mask", "shard_dim1", "all_reduce_dropped", "rope_default_theta", "head_random"])
def test_on_real_ranks_and_clean_afterwards(name):
    ids = prompts(768)
    report = align("fable", ids, patches=[fault(name)])
    assert report.first_divergence.name == fault(name).first_point and name in diagnose(report).names
    assert align("fable", ids).ok, "the fault stayed on the ranks"


def test_in_float64_the_judge_sees_it_too():
    report = align("fable", prompts(768), dtype="float64", patches=[fault("rope_default_theta")], logical=True)
    assert report.first_divergence.relative >= 1e6 * RELATIVE[report.dtype]


def test_the_seed_engine_names_its_faults_one_by_one():
    """Taking the faults away in the order of the notebooks, each step leaves the next one to be found."""
    forward = [name for name in SEED if name in FORWARD]
    for removed in range(len(forward)):
        report = align("fable", prompts(768), patches=[fault(name) for name in forward[removed:]], logical=True)
        assert set(diagnose(report).names) & set(forward[removed:])
    assert align("fable", prompts(768), logical=True).ok


@pytest.mark.pool
def test_a_function_from_a_cell_is_patched_like_a_fault():
    def mask_scores(scores, mask):
        return scores.masked_fill(mask, -1e4)       # hidden well enough: exp(-1e4) is 0

    mine = Patch("tplab.model.attention.mask_scores", mask_scores)
    assert align("fable", prompts(768), patches=[mine]).ok
    assert diagnose(align("fable", prompts(768), patches=[fault("no_mask"), mine])).ok, "the last patch of a name wins"


def test_reading_too_much_is_named_although_the_numbers_are_right():
    for ckpt in ("fable",):
        report = align(ckpt, prompts(768), patches=[fault("full_copy_on_every_rank")], logical=True)
        assert report.ok
        diagnosis = diagnose(report)
        assert diagnosis.fault == "full_copy_on_every_rank" and diagnosis.point == "load"
        assert 1.9 < diagnosis.numbers["times"] < 2.1


@pytest.mark.pool
@pytest.mark.parametrize("name", ["nan_mask", "no_mask"])
def test_the_masks_faults_are_named_on_long_prompts(name, tmp_path):
    """Where attention takes a prompt in runs of queries, and, with a cache, no run reads what is behind it."""
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", heads=6, kv_heads=2, seed=4))
    ids = [[(7 * at * at + 3 * at + count) % ckpt.config.vocab_size for at in range(count)] for count in (150, 70)]
    for report in (align(ckpt, ids, tensor_parallel_size=2, patches=[fault(name)]),
                   align_decode(ckpt, ids, new_tokens=2, tensor_parallel_size=2, patches=[fault(name)])):
        assert [one.fault for one in report.diagnoses] == [name], report.diagnoses


@pytest.mark.parametrize("name", ["read_before_wait", "buffer_reused", "wrong_rows_scattered"])
def test_sums_under_way_are_named_in_a_recorded_engine_without_an_op_log(name, tmp_path):
    """Uneven heads, and prompts whose last tokens come one by one, so that some ranks keep no row."""
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", heads=9, kv_heads=3, hidden=48))
    report = check(record_lab(tmp_path / "run", ckpt, prompts(67), 2, patches=[fault(name)], decoded=3), ckpt)
    assert report.verdict == "bug" and any(name in found.names for found in report.diagnoses)
