"""A text by a model of a learner's layers, and where there can be none."""

import pytest
from helpers.answers import defined
from helpers.notebooks import solutions

from course import lesson
from course.exercises.own_engine import layer_fits
from tplab import open_checkpoint
from tplab.align import hf_greedy

IDS = list(range(5, 24))


@pytest.fixture(scope="module")
def fable():
    return open_checkpoint("fable")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_layers_of_the_solution_write_what_hugging_face_writes(fable, size):
    layer = defined(solutions(["MyLayer"])["MyLayer"], "MyLayer")
    assert lesson.written(layer, fable, IDS, 12, tensor_parallel_size=size) == hf_greedy(fable, IDS, 12)


def test_without_a_layer_of_ones_own_the_engine_writes(fable):
    assert lesson.written(None, fable, IDS, 5) == hf_greedy(fable, IDS, 5)


def test_a_checkpoint_with_fused_weights_has_other_layers(fable):
    fused = lesson.fused_copy(fable)
    assert layer_fits(fable) and not layer_fits(fused)
    assert lesson.written(lambda *args: 1 / 0, fused, IDS, 3) == hf_greedy(fable, IDS, 3)
