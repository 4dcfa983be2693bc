"""Each trait equals Hugging Face, in a model that transformers made and saved: logits, decoding, text, shards.

``python tests/helpers/trait_sweep.py`` measures all of it on 1 to 4 ranks; here, each model is measured once.
"""

import pytest
import torch
from helpers import turns
from helpers.trait_models import EXPERTS, ODD, TRAITS, make_model, theta
from helpers.trait_sweep import hf_logits, measure, our_logits, some_prompts, undecided
from safetensors.torch import load_file, save_file

from tplab.align import reassemble
from tplab.checkpoint import open_checkpoint
from tplab.fast import why_not
from tplab.memory import parameter_bytes
from tplab.model import NoCache, load_model
from tplab.model.attention import causal_mask, within_window
from tplab.model.experts import softmax_then_top_k
from tplab.ranks import logical_ranks, op_log
from tplab.shard import ShardPlan


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """``model(name)``: an opened checkpoint of the table, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = open_checkpoint(make_model(tmp_path_factory.mktemp("trait") / "m", **TRAITS[name]))
        return made[name]
    return get


@pytest.mark.parametrize(("at", "name"), list(enumerate(TRAITS)))
def test_every_trait_equals_hugging_face(model, name, at):
    """On two to four ranks by turns; experts cut or dealt out, by turns as well."""
    ckpt = model(name)
    assert ckpt.config.traits
    for dealt_out in [False] if ckpt.config.experts is None else [False, True] if turns.ALL else [bool(at // 3 % 2)]:
        row = measure(ckpt, 2 + at % 3, dealt_out)
        assert row.ok and row.undecided == 0 and row.far[torch.float64] < 1e-13, str(row)


@pytest.mark.parametrize(("name", "dealt_out"), [("OLMo-3", False), ("gpt-oss", True), ("Gemma-3", False)])
def test_real_ranks_compute_what_logical_ones_do(model, pool, name, dealt_out):
    assert measure(model(name), 2, dealt_out, pool=pool, logical=False).ok


@pytest.mark.parametrize("name", TRAITS)
def test_shards_are_the_checkpoint_bit_for_bit_and_as_large_as_planned(model, name):
    ckpt = model(name)
    for dealt_out in [False, True][:1 + (ckpt.config.experts is not None)]:
        assert reassemble(ckpt, tensor_parallel_size=3, enable_expert_parallel=dealt_out, logical=True) == {}
        plan = ShardPlan.from_config(ckpt.config, 3, enable_expert_parallel=dealt_out)
        stats = logical_ranks(3, lambda plan=plan: load_model(ckpt, plan).load_stats)
        assert [one.parameter_bytes for one in stats] == [parameter_bytes(ckpt.config, shard, torch.float32)
                                                          for shard in plan.ranks]


def collectives(ckpt, plan):
    """On a rank: what one forward pass calls, without the logits."""
    model, before = load_model(ckpt, plan), len(op_log())
    with torch.inference_mode():
        model(torch.arange(5), torch.arange(5), NoCache([5]))
    return [record.op for record in op_log()[before:]]


@pytest.mark.parametrize(("name", "layer"), [
    ("window on all layers", ["all_reduce"] * 2), ("shared expert", ["all_reduce"] * 2),
    ("gpt-oss", ["all_reduce"] * 2), ("norm over the full width", ["all_gather", "all_reduce", "all_reduce"])])
def test_experts_have_one_all_reduce_and_a_full_width_norm_one_collective_more(model, name, layer):
    ckpt = model(name)
    for dealt_out in [False, True][:1 + (ckpt.config.experts is not None)]:
        plan = ShardPlan.from_config(ckpt.config, 2, enable_expert_parallel=dealt_out)
        assert logical_ranks(2, collectives, ckpt, plan) == [["all_reduce"] + layer * 3] * 2


def test_a_window_counts_the_query_itself_and_what_is_cached():
    for start, window, seen in [(0, 3, ["1000", "1100", "1110", "0111"]), (2, 1, ["0010", "0001"]),
                                (3, 9, ["1111"])]:
        mask = within_window(causal_mask(torch.arange(start, 4)[None], 4), window)
        assert ["".join(str(int(not hidden)) for hidden in row) for row in mask[0, 0]] == seen


@pytest.mark.parametrize("name", [name for name, config in TRAITS.items() if "num_experts_per_tok" not in config])
def test_in_bfloat16_it_is_as_exact_as_hugging_face(tmp_path, name):
    """Of experts, another one can be chosen in bfloat16, so those are left out."""
    ckpt = open_checkpoint(make_model(tmp_path / "m", dtype=torch.bfloat16, **TRAITS[name]))
    prompts = some_prompts(71)
    exact, theirs = (torch.cat(hf_logits(ckpt, dtype, prompts)).double() for dtype in (torch.float64, torch.bfloat16))
    for ours in logical_ranks(2, our_logits, ckpt, ShardPlan.from_config(ckpt.config, 2), torch.bfloat16, prompts):
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


# Where rounding chooses an expert.


def twins(folder, **config):
    """A model in which the router cannot tell experts 1 and 3 apart, though they are different ones."""
    make_model(folder, model_type="qwen3_moe", **ODD, **EXPERTS, norm_topk_prob=True, rope_parameters=theta(), **config)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[3] = tensor[1]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return open_checkpoint(folder)


def test_a_token_whose_experts_tie_is_left_out_and_all_ranks_choose_alike(tmp_path):
    ckpt = twins(tmp_path / "m")
    texts = some_prompts(71)
    left_out = undecided(ckpt, texts)
    assert all(skip.any() for skip in left_out if len(skip) > 10)
    assert all((skip.int().diff() >= 0).all() for skip in left_out), "what follows a token depends on it"
    for dealt_out in (False, True):
        plan = ShardPlan.from_config(ckpt.config, 3, enable_expert_parallel=dealt_out)
        first, *others = logical_ranks(3, our_logits, ckpt, plan, torch.float32, texts)
        assert all(torch.equal(first, other) for other in others)


def test_nothing_is_undecided_where_every_expert_is_taken_or_none_is_near(tmp_path, model):
    for config in (dict(num_experts=2), dict(num_experts=5)):
        ckpt = open_checkpoint(make_model(tmp_path / f"{config}", model_type="qwen3_moe", **ODD, **EXPERTS | config))
        assert not any(skip.any() for skip in undecided(ckpt, some_prompts(71)))
    assert not any(skip.any() for skip in undecided(model("Gemma-3"), some_prompts(71)))


def test_the_router_breaks_ties_by_the_same_rule_in_every_row():
    logits = torch.randn(1, 5).expand(7, 5).clone()
    logits[:, 3] = logits[:, 1] = logits.amax() + 1
    weights, ids = softmax_then_top_k(logits, 1, renormalize=True)
    assert len(set(ids[:, 0].tolist())) == 1 and weights.eq(1).all()


# Code that does not support a trait says so.


@pytest.mark.parametrize("name", TRAITS)
def test_the_fast_path_steps_aside_by_name(model, name):
    config = model(name).config
    assert why_not(config, torch.float32) == f"it does not support {config.traits[0]}"
