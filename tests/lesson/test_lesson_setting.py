"""What an answer is tried with in the engine: the prompt's ids, and one sequence a step at a time."""

from types import SimpleNamespace

import pytest

from tplab.lesson.stepping import Stepper
from tplab.lesson.verdict import Setting


@pytest.mark.parametrize("at_least, ids", [(1, [7, 8, 9]), (3, [7, 8, 9]), (5, [7, 8, 9, 7, 8]), (6, [7, 8, 9] * 2)])
def test_a_prompt_is_whole_and_begins_again_until_it_is_long_enough(at_least, ids):
    assert Setting(prompt=[7, 8, 9]).ids(at_least) == ids


@pytest.mark.parametrize("new_ids, positions, says", [
    ([4], [2], "next is position 3"), ([5], [3], "asked for tokens [5] at positions [3]"), ([], [], "next is position"),
    ([3, 4], [2, 3], "next is position 3"), ([4], 3, "step takes two lists, positions is int"), ([4], [3], "")])
def test_a_step_goes_on_with_the_token_that_was_drawn_where_it_belongs(new_ids, positions, says):
    drawn = iter([[4], [], [6]])  # a step that draws nothing is followed by another one
    llm = SimpleNamespace(add_request=lambda ids, params: asked.append((ids, params.max_tokens, params.ignore_eos)),
                          step=lambda: [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])
                                        for token in next(drawn)])
    asked, step = [], Stepper(llm, 9)
    assert step([1, 2, 3], range(3)) == 4 and asked == [([1, 2, 3], 9, True)]
    if not says:
        assert step(new_ids, positions) == 6 and len(asked) == 1
        return
    with pytest.raises(ValueError) as refused:
        step(new_ids, positions)
    assert says in str(refused.value)
