"""What notebooks and exercises measure with: answers, bits, rows of another run's text, experts, models in another
form, checkpoints that count what is read of them."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.failing import own_files

from course import lesson
from course.exercises.own_engine import Stepper
from course.judge import experts
from course.judge.answers import greedy
from course.judge.bits import bits, num_different, read_again
from course.judge.setting import Setting
from course.judge.toy_checkpoint import CountedCheckpoint, ToySource, toy_experts, toy_model
from tplab import LLM, SamplingParams, ShardPlan, open_checkpoint
from tplab.align import align, reassemble
from tplab.align.reference import hf_model
from tplab.faults import fault

pytestmark = pytest.mark.pool
IDS = [3, 1, 4, 15, 9, 26, 5]
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def fable():
    return open_checkpoint("fable")


def test_special_tokens_are_written_out():
    with LLM("fable", patches=[fault("nan_mask")]) as llm:
        end = llm.tokenizer.decode([0])
        assert lesson.ask(llm, "Once", max_tokens=3, ignore_eos=True) == end * 3  # all logits are NaN: token 0 for ever
        assert lesson.ask(llm, "Once", max_tokens=3) == end


def test_chat_models_are_asked_and_fable_goes_on_with_a_story(fable):
    assert lesson.default_question(fable) == lesson.default_prompt("fable") == lesson.default_prompt("fable-moe")
    for template, asked in (("{{ x }}", "What is the capital of France?"), (None, lesson.default_prompt("base"))):
        model = SimpleNamespace(name="other", tokenizer=partial(SimpleNamespace, chat_template=template))
        assert lesson.default_question(model) == asked


def test_batch_invariance_is_the_same_bits_in_all_ways_and_without_it_two_ranks_are_other_bits(tmp_path):
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", heads=4, kv_heads=2))
    prompts = [list(range(3, 15)), list(range(20, 43)), [40, 41, 42, 43, 44, 45]]
    found = {n: bits(ckpt, prompts, n, "float32") for n in (1, 3)}
    assert list(found[1]) == list(found[3]) and len(found[1]) == 6
    assert {num_different(found[1]["alone"], values) for ways in found.values() for values in ways.values()} == {0}
    assert all(60 <= len(one) <= 63 for one in found[1]["alone"]), "three tokens, twenty each and the drawn one"
    one, two = (bits(ckpt, prompts, n, "float32", batch_invariant=False)["alone"] for n in (1, 2))
    assert num_different(one, one) == 0 < num_different(one, two)


def test_the_rows_read_again_are_those_from_which_the_texts_were_chosen(fable):
    prompts = [list(range(5, 12)), list(range(20, 24))]
    texts = greedy(fable, prompts, 5, 1, logical=True)
    logits = read_again(fable, prompts, texts, 1, "float32")
    assert logits.shape == (10, fable.config.vocab_size) and logits.argmax(-1).tolist() == sum(texts, [])


def test_the_choice_of_experts_is_hugging_faces_for_one_prompt_and_for_two():
    ckpt, prompts = toy_experts(), [IDS, IDS[::-1] + [8]]
    with torch.inference_mode():
        said = [hf_model(ckpt, torch.float32)(torch.tensor([ids]), output_router_logits=True).router_logits
                for ids in prompts]
    for given, logits in ((IDS, [said[0]]), (prompts, said)):
        weights, ids = experts.chosen(ckpt, given)
        right = torch.stack([torch.cat(layer) for layer in zip(*logits)]).softmax(-1).topk(2)
        assert ids.equal(right.indices) and weights.sum(-1).allclose(torch.ones(1))
        assert weights.allclose(right.values / right.values.sum(-1, keepdim=True), atol=1e-5)


def test_an_expert_is_read_once_a_step_and_the_busiest_rank_is_waited_for():
    config = toy_experts().config
    matrix = 3 * config.hidden_size * 13 * 4
    chosen = torch.tensor([[[0, 1], [1, 2], [6, 0]], [[4, 5], [4, 5], [5, 6]]])  # layers, tokens, top_k
    whole, cut = (ShardPlan.from_config(config, 2, enable_expert_parallel=which) for which in (True, False))
    # Rank 0 has experts 0 to 3. Layer 0: {0, 1, 2} and then {0, 6}; layer 1: {4, 5}, {5, 6}.
    mean, busiest = experts.read_in_steps(config, whole, chosen, 2, 4)
    assert mean == (3 + 2) / 2 / 2 * matrix + 2 / 2 * matrix and busiest == (3 + 1) / 2 * matrix + 2 * matrix
    mean, busiest = experts.read_in_steps(config, cut, chosen, 2, 4)
    assert busiest == mean * 7 / 6.5, "of 13 columns rank 0 has 7"
    rows = experts.rows_of_ranks(whole, chosen)
    assert rows["layer 0"] == pytest.approx({"rank 0": 500 / 6, "rank 1": 100 / 6}) and rows["layer 1"]["rank 0"] == 0


def test_twice_as_many_heads_of_half_the_size_agree_with_hugging_face(fable):
    with lesson.changed_config(fable, num_attention_heads=16, num_key_value_heads=4, head_dim=8) as halved:
        assert (halved.config.num_heads, halved.config.num_kv_heads, halved.config.head_dim) == (16, 4, 8)
        assert align(halved, list(range(5, 14)), logical=True).ok
    assert fable.config.num_heads == 8


def test_a_checkpoint_that_was_opened_by_a_relative_path_is_found_and_nothing_stays(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m", layers=1)
    monkeypatch.chdir(tmp_path)
    with lesson.changed_config(open_checkpoint("m"), rms_norm_eps=0.5, new=[1]) as changed:
        folder = changed.folder
        config = json.loads((folder / "config.json").read_text())
        assert config["rms_norm_eps"] == 0.5 and config["new"] == [1] and config["num_hidden_layers"] == 1
        with changed.reader() as reader:
            assert reader[NORM][:].shape == (32,)
    assert not folder.exists()


def test_a_fused_copy_is_the_same_model_in_fewer_tensors(fable):
    made = lesson.fused_copy(fable)
    assert str(made.folder) in own_files()
    assert (len(fable.tensors), len(made.tensors)) == (74, 44)
    assert reassemble(made, tensor_parallel_size=3, logical=True) == {}
    apart, together = (align(one, [5, 6, 7], logical=True) for one in (fable, made))
    assert together.ok and torch.equal(apart.tp_logits, together.tp_logits)


def test_what_is_read_is_counted_by_tensor_whoever_opens_a_reader():
    toy = toy_model(9, 3, 2, True)
    counted = CountedCheckpoint(toy)
    for opened in (counted.reader(), counted.reader()):
        with opened as reader:
            reader[NORM][:5]
            assert reader["lm_head.weight"][1:3, :4].untyped_storage().nbytes() == 32
    assert dict(counted.taken) == {NORM: 2 * 20, "lm_head.weight": 2 * 32}
    with toy.reader() as reader:
        reader[NORM][:]
    assert counted.taken.total() == 104, "what others read is theirs"


def test_a_source_counts_what_is_read_and_lends_nothing():
    data = torch.arange(15.0).view(5, 3)
    source = ToySource(data)
    for index in (slice(1, 5), slice(2, 2), (slice(0, 5), slice(1, None)), ()):
        before, piece = source.taken, source[index]
        assert piece.equal(data[index]) and source.taken - before == piece.nbytes
        piece += 1
    assert data.equal(torch.arange(15.0).view(5, 3)) and source.shape == (5, 3) and source.dtype == torch.float32
    with pytest.raises(AttributeError, match="no .narrow: nothing of it is read yet"):
        source.narrow(0, 0, 1)


@pytest.mark.parametrize("at_least, ids", [(1, [7, 8, 9]), (5, [7, 8, 9, 7, 8]), (6, [7, 8, 9] * 2)])
def test_a_prompt_is_whole_and_begins_again_until_it_is_long_enough(at_least, ids):
    assert Setting(prompt=[7, 8, 9]).ids(at_least) == ids


@pytest.mark.parametrize("new_ids, positions, says", [
    ([4], [2], "next is position 3"), ([5], [3], "asked for tokens [5] at positions [3]"), ([], [], "next is position"),
    ([4], 3, "step takes two lists, positions is int"), (["four"], [3], "invalid literal for int"), ([4], [3], "")])
def test_a_step_goes_on_with_the_token_that_was_drawn_where_it_belongs(new_ids, positions, says):
    drawn = iter([[4], [], [6]])  # a step that draws nothing is followed by another one
    llm = SimpleNamespace(add_request=lambda ids, params: asked.append((ids, params)),
                          step=lambda: [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[9, token])])
                                        for token in next(drawn)])
    asked, step = [], Stepper(llm, 9)
    assert step([1, 2, 3], range(3)) == 4
    assert asked == [([1, 2, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))]
    if not says:
        assert step(new_ids, positions) == 6 and len(asked) == 1
        return
    with pytest.raises(ValueError) as refused:
        step(new_ids, positions)
    assert says in str(refused.value)
