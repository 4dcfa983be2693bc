"""Decoding steps that are repeated from a graph: the same tokens and the same bits as computed call by call, unless
somebody wants to see or to change what happens inside."""

from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab import LLM, RankPool, SamplingParams
from tplab.checkpoint import open_checkpoint
from tplab.engine import step_graph
from tplab.engine.runner import ModelRunner
from tplab.kernels.compiled import has
from tplab.model import attention
from tplab.model.trace import recording
from tplab.patch import Patch, applied
from tplab.ranks import op_log, state
from tplab.shard import ShardPlan

LARGE = {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 576, "inter": 960, "max_positions": 1024}
PROMPTS = [[5 + i] * n for i, n in enumerate((20, 3, 33, 17, 40))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By architecture, with weights that are large enough for the loops on three ranks."""
    made = {}

    def checkpoint(kind):
        if kind not in made:
            made[kind] = str(make_checkpoint(tmp_path_factory.mktemp(kind) / "m", kind, **LARGE))
        return made[kind]

    return checkpoint


def latest_runner():
    return [found for found in state.values() if isinstance(found, ModelRunner)][-1]


def graphs_on_rank():
    """``{kind: calls of its graph, or why there is none}`` of this rank's latest engine."""
    runner = latest_runner()
    return runner.graphs and {kind: step and (step.refused or len(step.graph.functions))
                              for kind, step in runner.graphs.steps.items()}


def outcome(model, pool, tokens=(12, 12, 9, 7, 5), params=None, dtype="float32", **options):
    """What is generated, with the bits of what it was chosen from; and the graphs of each rank."""
    with LLM(model, pool.size, dtype, pool=pool, **options) as llm:
        outputs = llm.generate(PROMPTS[:len(tokens)], [SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=count, logprobs=2, **params or {}) for count in tokens],
            use_tqdm=False)
        found = [(output.outputs[0].token_ids, [sorted((token, one.logprob) for token, one in place.items())
                                                for place in output.outputs[0].logprobs]) for output in outputs]
        return found, pool.run(graphs_on_rank)


def repeated(graphs):
    """How many kinds of steps each rank has a graph for."""
    return [sum(isinstance(calls, int) for calls in each.values()) for each in graphs]


@pytest.fixture(scope="module", params=[1, 2, 3])
def pool(request):
    with RankPool(request.param, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def two():
    with RankPool(2, timeout=60) as pool:
        yield pool


needs_loops = pytest.mark.skipif(not has("avx2") or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
                                 reason="a processor with AVX2 is needed")


@needs_loops
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_repeated_step_has_the_bits_of_one_that_is_computed(kind, dtype, pool, checkpoints):
    """Sequences of unlike lengths, of which one after the other ends; biases, norms of heads, uneven heads."""
    model = checkpoints(kind)
    right, none = outcome(model, pool, dtype=dtype, enforce_eager=True)
    found, graphs = outcome(model, pool, dtype=dtype)
    assert none == [None] * pool.size and found == right
    assert repeated(graphs) == [4] * pool.size, graphs


@needs_loops
def test_the_same_where_blocks_are_few_and_prompts_come_in_parts(two, checkpoints):
    """Sequences lose their place, come back to another row, and find blocks again."""
    sizes = {"num_blocks": 9, "block_size": 16, "max_num_batched_tokens": 32, "max_model_len": 96}
    tokens = (30, 30, 30, 30, 30)
    right, _ = outcome(checkpoints("qwen2"), two, tokens, enforce_eager=True, **sizes)
    found, graphs = outcome(checkpoints("qwen2"), two, tokens, **sizes)
    assert found == right and min(repeated(graphs)) >= 2, graphs


@needs_loops
def test_a_sequence_that_outgrows_its_room_gets_more(two, checkpoints):
    prompts = [[7] * 250, [8] * 3]
    found = {}
    for eager in (True, False):
        with LLM(checkpoints("qwen2"), 2, pool=two, enforce_eager=eager) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, ignore_eos=True, max_tokens=14),
                                   use_tqdm=False)
            found[eager] = [output.outputs[0].token_ids for output in outputs]
            graphs = two.run(graphs_on_rank)
    assert found[True] == found[False]
    assert [[kind[1] for kind in each] for each in graphs] == [[256, 512]] * 2 and repeated(graphs) == [2, 2]


@needs_loops
def test_drawing_at_random_is_not_a_graphs_business(two, checkpoints):
    params = {"temperature": 0.8, "seed": 3, "top_p": 0.9}

    def drawn(eager):
        with LLM(checkpoints("qwen2"), 2, pool=two, enforce_eager=eager) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(ignore_eos=True, max_tokens=10, **params), use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    assert drawn(True) == drawn(False)


@needs_loops
def test_what_the_ranks_ask_of_each_other_is_logged_as_always(two, checkpoints):
    """Where and what; and how many there were, so that what comes after a graph has the right number."""
    def logged(eager):
        with LLM(checkpoints("qwen2"), 2, pool=two, enforce_eager=eager) as llm:
            before = two.run(lambda: op_log()[-1].seq if op_log() else 0)[0]
            llm.generate([PROMPTS[0]], SamplingParams(temperature=0, ignore_eos=True, max_tokens=9), use_tqdm=False)
            return [[(one.seq - before, str(one), one.file.rpartition("/")[2], one.line, one.left)
                     for one in log if one.seq > before] for log in two.run(op_log)]

    right, found = logged(True), logged(False)
    assert found == right and len(found[0]) == 9 * (2 * 2 + 2) and all(one[-1] for one in found[0])


def changed_mask(scores, mask):
    return scores.masked_fill(mask, float("-inf"))


def traced():
    runner = latest_runner()
    right = runner.execute_model

    def execute(scheduler_output):
        with recording() as points:
            answer = right(scheduler_output)
        state["points"] = sorted(points)
        return answer

    runner.execute_model = execute


def hooked():
    runner = latest_runner()
    state["calls"] = 0

    def count(*_):
        state["calls"] += 1

    runner.model.layers[1].mlp.register_forward_hook(count)


def replaced():
    """As somebody does who knows nothing of patches."""
    right = attention.TensorParallelAttention.apply_rope
    state["right"], state["calls"] = right, 0

    def apply_rope(*given):
        state["calls"] += 1
        return right(*given)

    attention.TensorParallelAttention.apply_rope = apply_rope


def restored():
    attention.TensorParallelAttention.apply_rope = state["right"]


def generated(llm, tokens=8):
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
    return llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids


@needs_loops
def test_whoever_looks_into_a_step_gets_it_computed(two, checkpoints):
    """Also in the middle of steps that were repeated before, and afterwards they are again."""
    with LLM(checkpoints("qwen2"), 2, pool=two) as llm:
        right = generated(llm)
        assert repeated(two.run(graphs_on_rank)) == [1, 1]
        two.run(replaced)
        assert generated(llm) == right and two.run(lambda: state["calls"]) == [16, 16]
        two.run(restored)
        assert generated(llm) == right and two.run(lambda: state["calls"]) == [16, 16]
        two.run(hooked)
        assert generated(llm) == right and two.run(lambda: state["calls"]) == [8, 8]
        two.run(traced)
        assert generated(llm) == right
        assert all("layers.1.mlp" in points for points in two.run(lambda: state["points"]))


def other_parameter():
    down = latest_runner().model.layers[1].mlp.down_proj
    down.weight = torch.nn.Parameter(-down.weight, requires_grad=False)


def other_data():
    weight = latest_runner().model.layers[1].input_layernorm.weight
    weight.data = -weight.data


def written_in_place():
    with torch.no_grad():
        latest_runner().model.layers[1].input_layernorm.weight.neg_()
        latest_runner().model.layers[0].mlp.down_proj.weight.neg_()


def other_module():
    latest_runner().model.layers[0] = latest_runner().model.layers[1]


def other_forward():
    layer = latest_runner().model.layers[1]
    layer.forward = lambda hidden, cos, sin, context: type(layer).forward(layer, -hidden, cos, sin, context)


def other_number():
    latest_runner().model.layers[0].self_attn.scaling = 1.0


def fewer_layers():
    latest_runner().model.layers = latest_runner().model.layers[:1]


@needs_loops
@pytest.mark.parametrize("change", [other_parameter, other_data, written_in_place, other_module, other_forward,
                                    other_number, fewer_layers])
def test_what_is_put_in_the_place_of_something_counts_from_the_next_step_on(change, two, checkpoints):
    """Whoever does so in the middle gets what an engine without graphs gives."""
    found = {}
    for eager in (True, False):
        with LLM(checkpoints("qwen2"), 2, pool=two, enforce_eager=eager, enable_prefix_caching=False) as llm:
            right = generated(llm)
            if not eager:
                assert repeated(two.run(graphs_on_rank)) == [1, 1]
            two.run(change)
            found[eager] = generated(llm)
    assert found[True] == found[False] != right


@needs_loops
def test_a_patch_is_in_force_in_every_step(two, checkpoints):
    """Before a graph is there, and after; a fault shows, and is gone when it is."""
    wrong = Patch("tplab.model.attention.TensorParallelAttention.apply_rope", lambda self, q, k, cos, sin: (q, k))
    with LLM(checkpoints("qwen2"), 2, pool=two, enable_prefix_caching=False) as llm:
        right = generated(llm, 12)
        with applied(wrong):
            broken = generated(llm, 12)
        assert broken != right and generated(llm, 12) == right
    with LLM(checkpoints("qwen2"), 2, pool=two, enforce_eager=True) as llm, applied(wrong):
        assert generated(llm, 12) == broken


def test_a_model_of_small_weights_is_computed(two, tmp_path):
    """PyTorch multiplies those, so there is nothing to repeat; why, is kept."""
    model = str(make_checkpoint(tmp_path / "m"))
    right, _ = outcome(model, two, enforce_eager=True)
    found, graphs = outcome(model, two)
    assert found == right and repeated(graphs) == [0, 0]
    said = {step for each in graphs for step in each.values() if step}
    assert said <= {"aten.linear.default was called"}, graphs


def test_strict_computes(two, checkpoints):
    _, graphs = outcome(checkpoints("qwen2"), two, (6,), strict=True)
    assert graphs == [None, None]


def test_logical_ranks_compute(checkpoints):
    with LLM(checkpoints("qwen2"), 2, logical=True) as llm:
        generated(llm)
        for each in llm.engine.executor.states:
            assert not each[llm.engine.executor.key].graphs.steps


@needs_loops
def test_so_many_kinds_of_steps_are_kept(two, checkpoints, monkeypatch):
    """The oldest go first; one that comes again is met anew."""
    two.run(lambda: setattr(step_graph, "_MOST_KINDS", 2))
    try:
        _, graphs = outcome(checkpoints("qwen2"), two)
        assert all(len(each) == 2 for each in graphs)
    finally:
        two.run(lambda: setattr(step_graph, "_MOST_KINDS", 64))


@pytest.mark.parametrize("hidden, heads, columns, dtype, large", [
    (256, 8, 512, "float32", True), (256, 8, 512, "bfloat16", True), (256, 8, 512, "float64", False),
    (256, 8, 510, "float32", False), (128, 16, 1024, "float32", True), (128, 15, 1024, "float32", False)])
def test_steps_may_be_repeated_where_every_rank_has_large_weights(hidden, heads, columns, dtype, large):
    config = SimpleNamespace(**{**vars(open_checkpoint("fable").config), "hidden_size": hidden, "head_dim": 64,
                                "num_heads": heads, "num_kv_heads": heads, "intermediate_size": columns})
    assert step_graph.may_be_repeated(config, ShardPlan.from_config(config, 2), getattr(torch, dtype)) == large
