"""Notebook 15: a loop that keeps of several guesses what the model would have chosen."""

import torch

from course.exercises.own_engine import listed
from course.judge.answers import greedy
from course.judge.exercise import Example, Exercise
from course.judge.words import NotYet, in_words
from course.judge.work import whole_numbers
from tplab.cache import Segment, blocks_needed
from tplab.engine.config import EngineConfig
from tplab.engine.draft import propose
from tplab.engine.sampler import best_offer, offer
from tplab.invariant import make_runner
from tplab.model.dtypes import parse_dtype
from tplab.pool import shared_pool
from tplab.ranks import RankError
from tplab.shard import ShardPlan

COUNT, DRAFT = 24, 4  # tokens of a text, guesses of a step


def my_speculate(step, propose, ids, count):
    text, have = list(ids), 0
    while len(text) < len(ids) + count:
        draft = propose(text)
        new = text[have:] + draft
        chosen = step(new, list(range(have, have + len(new))))[len(text) - 1 - have:]
        kept = 0
        while kept < len(draft) and draft[kept] == chosen[kept]:
            kept += 1
        text += draft[:kept] + [chosen[kept]]
        have = len(text) - 1
    return text[len(ids):len(ids) + count]


class Toy:
    """The model's choice behind a token depends on all tokens in the cache up to it; all calls are kept, each with how
    often guesses had been asked for by then."""

    def __init__(self, guesses: int):
        self.cache, self.calls, self.guesses, self.asked = {}, [], guesses, []

    def __call__(self, new_ids, positions) -> list[int]:
        new_ids, positions = listed("new_ids", new_ids), listed("positions", positions)
        if len(new_ids) != len(positions) or not new_ids:
            raise ValueError(f"step was given {len(new_ids)} tokens and {len(positions)} positions")
        self.cache.update(zip(positions, new_ids))
        self.calls.append((new_ids, positions))
        if len(self.calls) > 100:
            raise NotYet(f"step has been called 100 times by now: what ends the loop? The latest call is given "
                         f"{new_ids[:4]} "
                         f"at positions {positions[:4]}")
        return [self.choice([self.cache.get(p, 0) for p in range(position + 1)]) for position in positions]

    def choice(self, tokens: list[int]) -> int:
        again = len(tokens) % 12 and len(tokens) > 3  # so guesses of all lengths stay, and of all lengths do not
        return tokens[-4] if again else (3 * sum(tokens) + len(tokens)) % 5

    def propose(self, token_ids) -> list[int]:
        self.asked.append(listed("token_ids", token_ids))
        return list(propose(self.asked[-1], self.guesses))

    def goes_on(self, ids, count: int) -> list[int]:
        """The prompt and what greedy decoding writes behind it."""
        text = list(ids)
        while len(text) < len(ids) + count:
            text.append(self.choice(text))
        return text


def guessed(answer, ids, count, guesses):
    """Each call goes on where the cache ends, with the text's tokens first; the text is greedy decoding's."""
    toy = Toy(guesses)
    text, have, known = toy.goes_on(ids, count + guesses + 1), 0, len(ids)
    found = whole_numbers(answer(toy, toy.propose, list(ids), count), "the new ids")
    for number, (new, positions) in enumerate(toy.calls, 1):
        yield f"call {number} begins at position", positions[0], have
        yield f"call {number} has positions", positions, [*range(have, have + len(new))]
        begins = f"call {number}, of position {have} on, begins with the text's tokens"
        yield begins, new[:known - have], text[have:known]
        accepted = next((n for n, pair in enumerate(zip(new, text[have:])) if pair[0] != pair[1]), len(new))
        have, known = have + accepted, have + accepted + 1
    for number, tokens in enumerate(toy.asked, 1):
        yield f"the text for which guesses are asked, time {number}, is", tokens, text[:len(tokens)]
    yield "the number of new ids is", len(found), count
    yield "it returns", found, text[len(ids):len(ids) + count]
    yield "the calls of step are", len(toy.calls)
    yield "the times that guesses are asked for are", len(toy.asked)


def on_a_rank(function, ckpt, size: int, dtype: str, ids: list[int]):
    """On a rank: what ``function`` writes with the batch-invariant model, and in how many calls."""
    plan, longest = ShardPlan.from_config(ckpt.config, size), len(ids) + COUNT + DRAFT + 1
    config = EngineConfig.for_model(ckpt.config, plan, parse_dtype(dtype), max_model_len=longest,
                                    num_blocks=blocks_needed(longest, 16))
    runner, calls = make_runner(ckpt, plan, config), []

    def step(new_ids, positions):
        new_ids, positions = listed("new_ids", new_ids), listed("positions", positions)
        segment = Segment(positions[0], len(new_ids), range(config.num_blocks), len(ids))
        logits, _ = runner.forward(torch.tensor(new_ids), torch.tensor(positions), [segment], list(range(len(new_ids))))
        calls.append(len(new_ids))
        return best_offer(offer(logits, runner.lm_head.rows.start)).tolist()

    def guess(token_ids):
        return list(propose(listed("token_ids", token_ids), DRAFT))

    with torch.inference_mode():
        return [int(token) for token in function(step, guess, list(ids), COUNT)], len(calls)


def in_the_engine(setting, answer):
    ckpt, size, ids = setting.checkpoint, setting.tensor_parallel_size, (setting.ids(8) * 2)[:60]
    dtype = setting.dtype if setting.dtype in ("float32", "bfloat16") else "float32"
    try:
        found, calls = shared_pool(size).run(on_a_rank, answer, ckpt, size, dtype, ids)[0]
    except RankError as error:  # of the learner's code
        raise NotYet(f"in the engine: {in_words(error)}") from error
    if found != greedy(ckpt, [ids], COUNT, size, dtype, batch_invariant=True)[0]:
        raise NotYet("in the engine, the text is not plain greedy's, though the toy's was right: what is different "
                     "with "
                     "other tokens?")
    return f"{COUNT} tokens took fewer steps" if calls < COUNT else ""


_KEEP = "text += draft[:kept] + [chosen[kept]]"
EXERCISES = [Exercise("15", my_speculate, lambda: [Example(*one, says=f"prompt {one[0]}, {one[1]} new, at most "
    f"{one[2]} guesses")
                                                   for one in (
    ([1, 2, 3, 4, 1, 2], 24, 3), ([0, 0, 0, 0], 12, 3), ([3, 1, 4, 1, 0], 1, 3), ([2], 7, 3), ([1, 2, 3], 6, 0),
    ([0, 0, 1, 1], 8, 3), ([4, 2], 0, 3))], {
    "the text is right, and no guesses are asked for, or none is used: a step gives the accepted guesses and one "
    "token more": (
        "propose(text) -> []", "propose(text) -> propose(text) and []"),
    "rejected guesses are counted as tokens in the cache; their keys have to be computed anew":
        "have = len(text) - 1 -> have += len(new)",
    "a guess that the model did not choose stays in the text": (
        "draft[kept] == chosen[kept] -> True", f"{_KEEP} -> text += draft[:kept + 1] + [chosen[kept]]"),
    "the model's choice behind the accepted guesses is missing: another one comes after them":
        f"{_KEEP} -> text += draft[:kept] + [chosen[0]]",
    "all of the text is computed again in each step, and the cache holds it": "have = len(text) - 1 -> have = 0",
    "more ids come back than are asked for: an accepted guess can be one too many":
        "return text[len(ids):len(ids) + count] -> return text[len(ids):]",
    "the prompt comes back, too": "return text[len(ids):len(ids) + count] -> return text[:len(ids) + count]",
    "only the first guess is used": "propose(text) -> propose(text)[:1]",
    "guesses are asked for the new tokens alone, and not for the whole text":
        "propose(text) -> propose(text[len(ids):])",
}, "no rejected token stays, in the text or in the cache; on {ranks}, the text is plain greedy's", guessed,
    engine=in_the_engine)]
