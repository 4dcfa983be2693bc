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


def test_what_is_asked_for_reaches_the_sampler():
    class Fake:
        tokenizer = SimpleNamespace(chat_template=None, decode=str)

        def chat_prompt(self, messages):
            return messages

        def generate(self, prompt, params, use_tqdm):
            assert use_tqdm is False
            asked.append((prompt, params.temperature, params.max_tokens, params.ignore_eos, params.seed))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[4, 2])])]

    asked = []
    assert lesson.ask(Fake(), "Once") == "[4, 2]"
    lesson.ask(Fake(), "Twice", 3, ignore_eos=True, temperature=1, seed=5)
    Fake.tokenizer.chat_template = "{{ x }}"
    lesson.ask(Fake(), "Who?", temperature=0.5)
    assert asked == [("Once", 0, 40, False, None), ("Twice", 1, 3, True, 5),
                     ([{"role": "user", "content": "Who?"}], 0.5, 40, False, None)]
