"""Answers with nothing hidden."""

from functools import partial
from types import SimpleNamespace

import pytest

from course import lesson
from tplab import LLM, open_checkpoint
from tplab.faults import fault


@pytest.mark.pool
def test_special_tokens_are_written_out():
    with LLM("fable", patches=[fault("nan_mask")]) as llm:
        end = llm.tokenizer.decode([0])
        assert lesson.ask(llm, "Once", max_tokens=3, ignore_eos=True) == end * 3  # all logits are NaN: token 0 for ever
        assert lesson.ask(llm, "Once", max_tokens=3) == end


def test_chat_models_are_asked_and_fable_goes_on_with_a_story():
    fable = open_checkpoint("fable")
    assert lesson.default_question(fable) == lesson.default_prompt("fable")
    for template, asked in (("{{ x }}", "What is the capital of France?"), (None, lesson.default_prompt("base"))):
        model = SimpleNamespace(name="other", tokenizer=partial(SimpleNamespace, chat_template=template))
        assert lesson.default_question(model) == asked
