"""What a reader of the text sees: a model's answer with nothing hidden."""

from tplab.checkpoint.names import EMBEDDED
from tplab.checkpoint.prompts import default_prompt

QUESTION = "What is the capital of France?"


def default_question(model) -> str:
    """The same for an answer: chat models get a question, but the embedded ones, which know stories only."""
    asked = model.tokenizer().chat_template and model.name not in EMBEDDED
    return QUESTION if asked else default_prompt(model)


def ask(llm, text: str, max_tokens: int = 40, **sampling) -> str:
    """What the model says to ``text``, greedily, special tokens written out: a chat turn if there is a template, or
    the text's continuation. ``sampling``: more of :class:`tplab.llm.SamplingParams`."""
    from tplab.llm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, **sampling})
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if llm.tokenizer.chat_template else text
    (output,) = llm.generate(prompt, params, use_tqdm=False)  # a bar that shows on slow machines only cannot be stored
    return llm.tokenizer.decode(output.outputs[0].token_ids)


def greedy(model, prompts, max_tokens, tensor_parallel_size=2, *args, one_by_one=False, patches=(), **options
           ) -> list[list[int]]:
    """The token ids that an engine writes behind each prompt; ``options`` are those of :class:`tplab.LLM`, and
    ``patches`` may be names of faults, too."""
    from tplab import LLM, SamplingParams
    from tplab.faults import as_patches

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    turns = [[prompt] for prompt in prompts] if one_by_one else [prompts]
    with LLM(model, tensor_parallel_size, *args, patches=as_patches(patches), **options) as llm:
        outputs = [output for turn in turns for output in llm.generate(list(map(list, turn)), params, use_tqdm=False)]
    return [list(output.outputs[0].token_ids) for output in outputs]
