"""Notebook 14: guesses from the text itself, and a loop that keeps of them what the model would have chosen."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from tplab.cache import Segment, blocks_needed
from tplab.checkpoint import Checkpoint
from tplab.checks import counted
from tplab.engine.config import EngineConfig
from tplab.engine.draft import num_accepted, propose
from tplab.engine.sampler import best_offer, offer
from tplab.invariant import make_runner
from tplab.lesson.answers import greedy
from tplab.lesson.attempt import Attempt, NotYet, Uncopied, on_ranks, saying, whole_numbers
from tplab.lesson.own_engine import listed
from tplab.lesson.verdict import Setting, at, exercise
from tplab.lesson.words import first_cause, in_words
from tplab.llm import LLM, SamplingParams
from tplab.model.dtypes import parse_dtype
from tplab.pool import shared_pool
from tplab.shard import ShardPlan

COUNT, DRAFT = 24, 4  # tokens of a text, guesses of a step
TOKENS = (([1, 2, 3, 9, 1, 2, 3], 2), ([1, 2, 3, 5, 8, 1, 2, 3, 6, 7, 1, 2, 3], 2), ([4, 2, 3, 9, 3, 7, 2, 3], 2),
          ([7, 1, 7, 2, 7], 3), ([5, 5, 5], 2), ([8, 9, 8, 9], 4), ([1, 2, 3], 4), ([1], 4), ([6, 6], 0),
          ([0, 3, 0, 4, 0], 1), ([7, 7, 7, 7], 2), ([7, 8, 1, 8, 2, 7, 8], 2),
          ([1, 2, 3, 4, 7, 9, 2, 3, 4, 8, 1, 2, 3, 4], 1))

LOOPS = (([1, 2, 3, 4, 1, 2], 12, 3), ([0, 0, 0, 0], 12, 3), ([3, 1, 4, 1, 0], 1, 3), ([2], 7, 3), ([1, 2, 3], 6, 0),
         ([0, 0, 1, 1], 8, 3))


def _dtype(setting: Setting) -> str:
    return setting.dtype if setting.dtype in ("float32", "bfloat16") else "float32"


def _ids(setting: Setting) -> list[int]:
    """A prompt in which something stands twice."""
    return (setting.ids(8) * 2)[:60]


@exercise("my_propose", "14", takes="token_ids, count", patches=at("tplab.engine.scheduler.propose"),
          agreed="every guess is what followed the longest ending that stood there before; with them, the text on "
                 "{ranks} is plain greedy's")
def my_propose(attempt: Attempt, setting: Setting):
    """Endings of three, two, one and no tokens that stood before; then the engine's drafts."""
    for tokens, count in TOKENS:
        _judge_guess(attempt(list(tokens), count), tokens, count)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)

    def write(**options):
        with LLM(setting.checkpoint, setting.tensor_parallel_size, _dtype(setting), batch_invariant=True, **options
                 ) as llm:
            return llm.generate([_ids(setting)], params, use_tqdm=False)[0]

    try:
        drafted = write(num_speculative_tokens=DRAFT, patches=setting.patches)
    except Exception as error:  # of the learner's code, in the scheduler
        raise NotYet(f"in the engine: {in_words(first_cause(error))}") from error
    if list(drafted.outputs[0].token_ids) != list(write().outputs[0].token_ids):
        raise NotYet("in the engine, the text is not plain greedy's: a guess may be wrong, but it must be token ids")


def _judge_guess(found, tokens: Sequence[int], count: int) -> None:
    with saying(f"tokens {list(tokens)}, count {count}: "):
        found, right, size = tuple(whole_numbers(found, "the guess")), propose(tokens, count), len(tokens)
        if found == right:
            return
        said = f"it guesses {list(found)}, and {list(right)} is right"
        places = {length: [start for start in range(size - length)
                           if tuple(tokens[start:start + length]) == tuple(tokens[size - length:])]
                  for length in (3, 2, 1) if length < size}
        known = {length: some for length, some in places.items() if some}
        longest = next(iter(known), 0)

        def behind(length, start, many=count):
            return tuple(tokens[start + length:start + length + many])

        apart = next((behind(length, max(free)) for length, some in known.items()
                      if (free := [start for start in some if start + length <= size - length])), None)
        first = {behind(length, some[0]) for length, some in known.items()}
        shorter = {behind(length, some[-1]) for length, some in known.items() if length != longest}
        ways = (
            (not found and longest, f"the last {counted(longest, 'token')} stood there before, and something "
             "followed" + {3: ": is the place you found the ending itself?",
                           1: ": where only one token agrees, that is an ending too"}.get(longest, "")),
            (found and not known, "nothing of its ending stood there before: there is no guess, ()"),
            (found == apart, "a place may overlap the ending: it only has to begin before it"),
            (found == tuple(tokens[size - longest:])[:count] and longest,
             "that is the ending itself: what followed it, where it stood before?"),
            (found[:longest] == tuple(tokens[size - longest:]) and longest,
             "it begins with the ending itself; only what followed is asked for"),
            (len(found) > count, f"that is more than {count}"),
            (found in shorter, f"a longer ending, of {longest} tokens, stood there before, and says more"),
            (found in first, "the ending stood there more than once: take the last place where it occurs"),
            (found == right[:len(found)], "what followed goes on"))
        raise NotYet(f"{said}\n" + next((says for holds, says in ways if holds),
                                        "What followed the ending, where it stood before?"))


class Toy(Uncopied):
    """The model's choice behind a token depends on all tokens in the cache up to it; all calls are kept, each with how
    many of its last tokens are guesses."""

    def __init__(self, guesses: int):
        self.cache, self.calls, self.guesses, self.guess, self.asked = {}, [], guesses, [], []

    def __call__(self, new_ids, positions) -> list[int]:
        new_ids, positions = listed("new_ids", new_ids), listed("positions", positions)
        if len(new_ids) != len(positions):
            raise ValueError(f"step was given {len(new_ids)} tokens and {len(positions)} positions")
        if not new_ids:
            raise NotYet(f"call {len(self.calls) + 1} computes no token: how much of the text is in the cache? The "
                         "newest token is not, and what was rejected is not either")
        self.cache.update(zip(positions, new_ids))
        chosen = [self.choice([self.cache.get(p, 0) for p in range(position + 1)]) for position in positions]
        guessed = next(count for count in range(min(len(self.guess), len(new_ids)), -1, -1)
                       if new_ids[len(new_ids) - count:] == self.guess[:count])
        self.calls.append((new_ids, positions, guessed))
        self.guess = []
        if len(self.calls) > 100:
            raise NotYet("step has been called 100 times by now: what ends the loop?")
        return chosen

    def choice(self, tokens: list[int]) -> int:
        return (tokens[-1] * 2 + sum(tokens[-3:]) // 4 + len(tokens) // 7) % 5

    def propose(self, token_ids) -> list[int]:
        self.asked.append(listed("token_ids", token_ids))
        self.guess = list(propose(self.asked[-1], self.guesses))
        return list(self.guess)

    def goes_on(self, ids: Sequence[int], count: int) -> list[int]:
        """The prompt and what greedy decoding writes behind it."""
        text = list(ids)
        while len(text) < len(ids) + count:
            text.append(self.choice(text))
        return text


def speculate(step: Callable, propose: Callable, ids: list[int], count: int) -> list[int]:
    """What the exercise asks for."""
    text, have = list(ids), 0
    while len(text) < len(ids) + count:
        draft = list(propose(text))[:len(ids) + count - len(text) - 1]
        new = text[have:] + draft
        chosen = step(new, list(range(have, have + len(new))))[len(new) - len(draft) - 1:]
        kept = num_accepted(draft, chosen)
        text += [*draft[:kept], chosen[kept]]
        have = len(text) - 1
    return text[len(ids):]


@exercise("my_speculate", "14", takes="step, propose, ids, count", right=speculate,
          agreed="no rejected token stays, in the text or in the cache; on {ranks}, the text is plain greedy's")
def my_speculate(attempt: Attempt, setting: Setting):
    """A toy whose cache remembers what it was given; then the model on its ranks."""
    for ids, count, guesses in LOOPS:
        toy, right = Toy(guesses), Toy(guesses)
        speculate(right, right.propose, list(ids), count)
        found = attempt(toy, toy.propose, list(ids), count)
        with saying(f"prompt {ids}, {count} new, at most {guesses} guesses: "):
            _judge_loop(toy, right, found, ids, count)
    ckpt, size, ids = setting.checkpoint, setting.tensor_parallel_size, _ids(setting)
    with saying("in the engine: "):
        ran = on_ranks(shared_pool(size), _on_a_rank, attempt.function, ckpt, size, _dtype(setting), ids)
        plain = greedy(ckpt, [ids], COUNT, size, _dtype(setting), batch_invariant=True)[0]
        (found, calls), _ = ran[0]
        if found != plain:
            raise NotYet("the text is not plain greedy's, though the toy's was right: what is different with other "
                         "tokens?")
    return f"{COUNT} tokens took fewer steps" if calls < COUNT else ""


def _on_a_rank(function: Callable, ckpt: Checkpoint, size: int, dtype: str, ids: list[int]):
    """On a rank: what ``function`` writes with the batch-invariant model, and in how many calls."""
    plan, longest = ShardPlan.from_config(ckpt.config, size), len(ids) + COUNT + DRAFT + 1
    config = EngineConfig.for_model(ckpt.config, plan, parse_dtype(dtype), max_model_len=longest,
                                    num_blocks=blocks_needed(longest, 16))
    runner, calls = make_runner(ckpt, plan, config), []

    def step(new_ids, positions):
        new_ids, positions = listed("new_ids", new_ids), listed("positions", positions)
        segment = Segment(positions[0], len(new_ids), range(config.num_blocks), len(ids))
        logits, _ = runner.forward(torch.tensor(new_ids), torch.tensor(positions), [segment],
                                   list(range(len(new_ids))))
        calls.append(len(new_ids))
        return best_offer(offer(logits, runner.lm_head.rows.start)).tolist()

    def guess(token_ids):
        return list(propose(listed("token_ids", token_ids), DRAFT))

    with torch.inference_mode():
        return [int(token) for token in function(step, guess, list(ids), COUNT)], len(calls)


def _judge_loop(toy: Toy, right: Toy, found, ids: list[int], count: int) -> None:
    found, text = whole_numbers(found, "the new ids"), toy.goes_on(ids, count + toy.guesses + 1)
    if not toy.calls:
        raise NotYet("step is never called: whose tokens are these?")
    have, rejected = 0, {}  # how much of the text is in the cache; what else was tried at a position
    for number, (new, positions, guessed) in enumerate(toy.calls, 1):
        said, first = f"call {number} ", positions[0]
        if positions != list(range(first, first + len(new))):
            raise NotYet(f"{said}has positions {positions[:6]}; they follow each other")
        if first > have:
            raise NotYet(f"{said}begins at position {first}, and " + (
                f"position {have} holds a guess that was rejected: its key has to be computed anew"
                if have in rejected else f"the cache holds {have} tokens of the text: which is the next?"))
        right_ones = next((at for at, pair in enumerate(zip(new, text[first:])) if pair[0] != pair[1]), len(new))
        at = first + right_ones
        if right_ones < len(new) - guessed:
            raise NotYet(f"{said}is given {new[right_ones]} at position {at}, where the text has {text[at]}" + (
                f"\n{new[right_ones]} was a guess there, and the model chose {text[at]}: it must go"
                if rejected.get(at) == new[right_ones] else
                "\nBehind the guesses that stay comes the model's choice behind the last of them"))
        have = max(have, at) if right_ones == len(new) else at
        rejected |= dict(enumerate(new[right_ones:], at))
    theirs = text[len(ids):len(ids) + count]
    if found[:len(ids)] == ids and len(found) == len(ids) + count:
        raise NotYet("the prompt comes back too; only the new ids are asked for")
    if found != theirs:
        same = next((at for at, pair in enumerate(zip(found, theirs)) if pair[0] != pair[1]), None)
        if same is None:
            raise NotYet(f"{len(found)} ids come back, and {count} are asked for" + (
                ": an accepted guess can be one too many" if len(found) > count else
                ": behind the guesses that stay, the model has chosen one more"))
        raise NotYet(f"new token {same} is {found[same]}, and greedy decoding has {theirs[same]} there" + (
            f"\n{found[same]} was a guess that the model rejected" * (rejected.get(len(ids) + same) == found[same])))
    other = next((after for before, after in pairwise([[], *toy.asked]) if len(after) <= len(before)
                  or after != text[:len(after)]), None)
    if other is not None:
        raise NotYet(f"the text is right, and propose is given {len(other)} tokens, {other[:6]} …, where the text so "
                     "far must be given")
    enough, computed, needed = len(right.calls), *(sum(len(new) for new, *_ in one.calls) for one in (toy, right))
    if len(toy.calls) > enough + 2:  # another first step shifts what is guessed
        raise NotYet(f"the text is right and took {len(toy.calls)} calls, where {enough} are enough: " + (
            "what is propose for?" if all(len(new) == 1 for new, *_ in toy.calls[1:]) else
            "a call gives the accepted guesses and one token more"))
    if computed > needed + 12:
        raise NotYet(f"the text is right, and {computed} tokens were computed for it, where {needed} are enough: what "
                     "is in the cache stays there")
