"""What an answer is tried with in the engine: the prompt's ids, and one sequence a step at a time."""

from types import SimpleNamespace

import pytest
import torch

from course.exercises.own_engine import Stepper
from course.judge.setting import Setting
from course.judge.toy_checkpoint import ToySource
from tplab import SamplingParams


@pytest.mark.parametrize("at_least, ids", [(1, [7, 8, 9]), (3, [7, 8, 9]), (5, [7, 8, 9, 7, 8]), (6, [7, 8, 9] * 2)])
def test_a_prompt_is_whole_and_begins_again_until_it_is_long_enough(at_least, ids):
    assert Setting(prompt=[7, 8, 9]).ids(at_least) == ids


@pytest.mark.parametrize("new_ids, positions, says", [
    ([4], [2], "next is position 3"), ([5], [3], "asked for tokens [5] at positions [3]"), ([], [], "next is position"),
    ([3, 4], [2, 3], "next is position 3"), ([4], 3, "step takes two lists, positions is int"),
    (None, [3], "step takes two lists, new_ids is NoneType"), (["four"], [3], "invalid literal for int"),
    ([4], [3], "")])
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


@pytest.mark.parametrize("prompt, prompts", [([7, 8, 9, 10, 11], [[7, 8, 9, 10, 11], [7, 8], [9, 10, 11]]),
                                             ([7], [[7], [7], [7]])])
def test_a_reference_is_of_three_prompts_however_short_the_first(prompt, prompts, monkeypatch):
    monkeypatch.setattr("course.judge.setting.hf_greedy", lambda ckpt, *given: (ckpt.name, *given))
    asked, written = Setting(prompt=prompt, dtype="float64").reference(5)
    assert asked == prompts and written == [("fable", one, 5, "float64") for one in prompts]


def test_a_source_counts_what_is_read_and_lends_nothing():
    data = torch.arange(15.0).view(5, 3)
    source = ToySource(data)
    for index in (slice(1, 5), slice(2, 2), slice(None, None, 1), (slice(0, 5), slice(1, None)), ()):
        before, piece = source.taken, source[index]
        assert piece.equal(data[index]) and source.taken - before == piece.nbytes
        piece += 1
    assert data.equal(torch.arange(15.0).view(5, 3)) and source.shape == (5, 3) and source.dtype == torch.float32
    with pytest.raises(AttributeError, match="no .narrow: nothing of it is read yet"):
        source.narrow(0, 0, 1)
