"""Of the last layer, only the rows that a token is drawn from: nobody can tell, but by what is computed."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab import LLM, RankPool, SamplingParams
from tplab.cache import PagedKVCache, Segment
from tplab.checkpoint import open_checkpoint
from tplab.engine.config import EngineConfig
from tplab.engine.runner import ModelRunner
from tplab.engine.step import SamplingMetadata, ScheduledRequest, SchedulerOutput
from tplab.model import NoCache, load_model
from tplab.model.trace import recording
from tplab.patch import Patch
from tplab.ranks import logical_ranks, op_log, rank
from tplab.shard import ShardPlan

GREEDY = SamplingMetadata(0.0, 0, 1.0, 0.0, 1, 0, None)
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=5)
IDS = [[5, 30, 17, 3, 44], [7, 8], [60, 61, 62, 63]]


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def folder(request, tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp(request.param) / "m", request.param))


def sized(folder, ranks=2, dtype=torch.float64, **options):
    """The checkpoint, its plan, and a small engine's configuration."""
    ckpt = open_checkpoint(folder)
    return ckpt, ShardPlan.from_config(ckpt.config, ranks), EngineConfig(
        vocab_size=ckpt.config.vocab_size, max_model_len=64, num_blocks=4, dtype=dtype, **options)


def described(due):
    """A step of three prompts, of which those are due that are named."""
    return SchedulerOutput(1, tuple(
        ScheduledRequest(number, Segment(0, len(ids), (number,), len(ids)), tuple(ids),
                         GREEDY if number in due else None) for number, ids in enumerate(IDS)))


def stepped(folder, due, prune):
    """On two logical ranks: the points of that step, and the tokens drawn."""
    ckpt, plan, config = sized(folder, prune_last_layer=prune)

    def on_rank():
        runner = ModelRunner(ckpt, plan, config)
        with recording() as points:
            drawn = dict(runner.execute_model(described(due)).sampled_token_ids)
        return points, drawn

    return logical_ranks(2, on_rank), ckpt.config.num_layers - 1


@pytest.mark.parametrize("due, rows", [([0, 1, 2], [4, 6, 10]), ([1], [6]), ([0, 2], [4, 10]), ([], [10])], ids=str)
def test_the_same_rows_and_no_others(folder, due, rows):
    """Up to the last layer's residual all rows, for their keys and values; behind it those that are due, in order. A
    step in which none is due computes a single one."""
    (whole, last), (pruned, _) = stepped(folder, due, False), stepped(folder, due, True)
    after = [f"layers.{last}.{name}" for name in ("post_norm", "mlp_act", "mlp_partial", "mlp", "output")] + ["norm"]
    for (right, drawn), (found, drawn_too) in zip(whole, pruned, strict=True):
        assert drawn == drawn_too and sorted(drawn) == due and right.keys() == found.keys() and set(after) <= set(found)
        for name, values in found.items():
            expected = right[name][rows] if name in after else right[name]
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12, msg=name)


def test_where_all_are_due_nothing_is_left_out(folder):
    ckpt, plan, config = sized(folder, ranks=1)
    step = SchedulerOutput(1, tuple(ScheduledRequest(n, Segment(0, 1, (n,), 1), (5 + n,), GREEDY) for n in range(3)))

    def on_rank():
        runner, wanted = ModelRunner(ckpt, plan, config), []
        runner.model.register_forward_pre_hook(lambda _, given: wanted.append(given[2].logits_indices))
        runner.execute_model(step)
        return wanted

    assert logical_ranks(1, on_rank) == [[None]]


def test_a_context_can_be_used_again(folder):
    """It says the same thing after a pass as before, also to a model of one layer, or of one layer twice."""
    ckpt, plan, _ = sized(folder)
    ids, positions = torch.tensor(sum(IDS, [])), torch.tensor([0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3])
    wanted = torch.tensor([6, 4])

    @torch.inference_mode()
    def on_rank():
        model = load_model(ckpt, plan, torch.float64)
        right = model(ids, positions, NoCache([5, 2, 4]))
        context = NoCache([5, 2, 4])
        context.logits_indices = wanted
        found = [model(ids, positions, context), model(ids, positions, context)]
        cache = PagedKVCache(ckpt.config.num_layers, 4, 16, len(model.shard.kv_heads), plan.head_dim, torch.float64)
        paged = cache.context([Segment(0, 5, (0,), 5), Segment(0, 2, (2,), 2), Segment(0, 4, (1,), 4)])
        paged.logits_indices = wanted
        found.append(model(ids, positions, paged))
        model.layers[0] = model.layers[-1]
        twice = model(ids, positions, NoCache([5, 2, 4])), model(ids, positions, context)
        model.layers = model.layers[:1]
        once = model(ids, positions, NoCache([5, 2, 4])), model(ids, positions, context)
        return right, found, twice, once

    for right, found, twice, once in logical_ranks(2, on_rank):
        for pruned in found:
            torch.testing.assert_close(pruned, right[wanted], rtol=1e-12, atol=1e-12)
        for whole, pruned in (twice, once):
            torch.testing.assert_close(pruned, whole[wanted], rtol=1e-12, atol=1e-12)


def whole_forward(self, hidden, cos, sin, context):
    """A layer as somebody writes it who knows nothing of this."""
    hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, context)
    return hidden + self.mlp(self.post_attention_layernorm(hidden))


def test_a_layer_that_computes_all_rows_is_right_too(folder):
    """Also where a prompt comes in parts, of which only the last one is due. Nothing is left out if one says so."""
    found = {}
    patches = [Patch("tplab.model.decoder.DecoderLayer.forward", whole_forward)]
    with RankPool(2, timeout=60) as pool:
        for name, options in ("own", {}), ("whole", {"patches": patches}), ("all rows", {"prune_last_layer": False}):
            with LLM(folder, 2, "float64", pool=pool, max_num_batched_tokens=4, **options) as llm:
                before = pool.run(lambda: op_log()[-1].seq if op_log() else 0)[0]
                outputs = llm.generate(IDS, PARAMS, use_tqdm=False)
                log = pool.run(lambda: [one for one in op_log() if one.op.startswith("all_reduce")])
                rows = [one.shape[0] for one in log[0] if one.seq > before]
                found[name] = [output.outputs[0].token_ids for output in outputs], rows
    assert found["own"][0] == found["whole"][0] == found["all rows"][0]
    assert found["whole"][1] == found["all rows"][1] != found["own"][1]
    each = 1 + 2 * llm.checkpoint.config.num_layers
    steps = [(rows[0], rows[each - 1]) for rows in zip(*[iter(found["own"][1])] * each)]
    assert steps[:3] == [(4, 1), (4, 2), (4, 2)], steps


def test_a_rank_sends_no_more_than_it_must(folder):
    """The last MLP's all-reduce is as small as the rows that are due."""
    ckpt, plan, config = sized(folder, dtype=torch.float32)

    def on_rank():
        ModelRunner(ckpt, plan, config).execute_model(described([0, 2]))
        return rank(), [one.shape[0] for one in op_log() if one.op == "all_reduce"]

    expected = [11] * 2 * ckpt.config.num_layers + [2]
    assert logical_ranks(2, on_rank) == [(0, expected), (1, expected)]
