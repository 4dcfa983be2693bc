"""Notebook 06: prefill once, then one token a step."""

from course.judge.attempt import Attempt, NotYet, Uncopied, guarded, saying, whole_numbers
from course.judge.own_engine import Stepper, listed
from course.judge.verdict import Setting, exercise
from tplab.checks import counted
from tplab.llm.llm import LLM

COUNT = 24
ENDS = 0, 0, 3, 2, 11, 12, 1, 7  # drawn behind one token: ids that end texts elsewhere
_MOST_CALLS = 300


@exercise("my_generate", "06", takes="step, ids, count",
          place="is the loop around it all",  # it calls the engine: see own_engine.py
          agreed=f"on {{ranks}}, {COUNT} tokens are Hugging Face's")
def my_generate(attempt: Attempt, setting: Setting):
    """A toy that keeps what it is given by position; then the engine, whose computed tokens are counted."""
    for ids, count, draws in (
            ([*range(20, 63)], COUNT, ()), ([3, 1, 4, 1, 5], 4, ()), ([9, 9], 1, ()), ([24], 8, ENDS)):
        toy = Toy(draws)
        with saying(f"prompt of {len(ids)}, {count} new: "):
            judge_calls(toy, attempt(toy, ids, count), ids, count)
    (ids, *_), (reference, *_) = setting.reference(COUNT)
    with LLM(setting.model, setting.tensor_parallel_size, setting.dtype, enable_prefix_caching=False) as llm:
        step = Stepper(llm, COUNT)
        found = guarded(attempt.function, step, list(ids), COUNT)
        computed = step.computed
    if found != reference:
        raise NotYet("in the engine, the text is not Hugging Face's, though the toy's was right: what is different "
                     "with other tokens?")
    whole = sum(len(ids) + i for i in range(COUNT))  # when each step reads the text from its beginning
    return f"{computed:,} tokens computed for them, {whole:,} if none were kept"


class Toy(Uncopied):
    """The next token depends on all tokens in the cache and on where they stand, or is of ``draws``."""

    def __init__(self, draws=()):
        self.cache, self.calls, self.drawn, self.draws = {}, [], [], iter(draws)

    def __call__(self, new_ids, positions):
        new_ids, positions = listed("new_ids", new_ids), listed("positions", positions)
        if len(new_ids) != len(positions) or not new_ids:
            raise ValueError(f"step was given {len(new_ids)} tokens and {len(positions)} positions")
        self.calls.append((new_ids, positions))
        if len(self.calls) > _MOST_CALLS:
            raise NotYet(f"{_MOST_CALLS} calls, and it goes on: what ends the loop?")
        self.cache.update(zip(positions, new_ids))
        self.drawn.append(next(self.draws, sum((p + 2) * (t + 1) for p, t in self.cache.items()) % 50))
        return self.drawn[-1]


def judge_calls(toy: Toy, found, ids: list[int], count: int, drawn: str = "the token that was drawn for it") -> None:
    """Refuse what came back, unless each token was computed once, where it stands, and the ``drawn`` came back."""
    found = whole_numbers(found, "the new ids")
    if not toy.calls and count:
        raise NotYet("step is never called; what computes the tokens?")
    text, have = list(ids), 0  # what is known by then, and how much of it is in the cache
    for number, (new, positions) in enumerate(toy.calls, 1):
        if positions == list(range(len(text))) and new == text:
            have = 0  # the whole text once more: right, and slow
        if positions != list(range(have, have + len(new))):
            cached = f"{have} tokens are in the cache, at 0 to {have - 1}" if have else "nothing is in the cache"
            raise NotYet(f"call {number} computes positions {positions[:6]}, and {cached}: which come next?")
        if new != (known := text[have:have + len(new)]):
            at = next((at for at, pair in enumerate(zip(new, known)) if pair[0] != pair[1]), 0)
            next_one = f"the prompt has {known[at:at + 6]} there" if have < len(ids) else f"{drawn} is {text[have]}"
            raise NotYet(f"call {number} is given {new[at:at + 6]} at position {have + at}, and {next_one}")
        have += len(new)
        text += [toy.drawn[number - 1]] * (have == len(text))
    if found[:len(ids)] == ids and len(found) == len(ids) + count:
        raise NotYet("the prompt comes back too; only the new ids are asked for")
    if count and len(found) > count and found[-count:] == text[len(ids):]:
        raise NotYet(f"{len(found)} ids came back. The last {count} are right: what stood in the list before?")
    if len(found) != count:
        raise NotYet(f"{counted(len(found), 'id')} came back; {counted(count, 'new one')} must" +
                     ", whichever are drawn" * (len(found) < count))
    if found != text[len(ids):len(ids) + count]:
        raise NotYet("the first new token is missing: which call has drawn it?" if found == toy.drawn[1:count + 1] else
                     f"{found[:6]} come back, and {toy.drawn[:6]} have been drawn")
    computed, enough = sum(len(new) for new, _ in toy.calls), len(ids) + count - 1
    if count and (computed != enough or len(toy.calls) != count):
        raise NotYet(f"the tokens are right, and {computed:,} were computed for them in {len(toy.calls)} calls; "
                     f"{enough} in {count} are enough: " + (
            "one more than needed, nothing reads what comes after the last one" if computed == enough + 1 else
            "the engine keeps keys and values. Which token is new in a step?" if computed != enough else
            "the prompt can be read at once"))
