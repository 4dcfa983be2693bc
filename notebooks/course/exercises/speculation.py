"""Notebook 15: guesses from the text itself, and a loop that keeps of them what the model would have chosen."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from course.judge.answers import greedy
from course.judge.attempt import Attempt, NotYet, Uncopied, on_ranks, saying, whole_numbers
from course.judge.own_engine import listed
from course.judge.verdict import Setting, at, exercise
from course.judge.words import first_cause, in_words
from tplab.cache import Segment, blocks_needed
from tplab.checkpoint import Checkpoint
from tplab.checks import counted
from tplab.engine.config import EngineConfig
from tplab.engine.draft import num_accepted, propose
from tplab.engine.sampler import best_offer, offer
from tplab.invariant import make_runner
from tplab.llm import LLM, SamplingParams
from tplab.model.dtypes import parse_dtype
from tplab.pool import shared_pool
from tplab.shard import ShardPlan

COUNT, DRAFT = 24, 4  # tokens of a text, guesses of a step
LOOPS = (([1, 2, 3, 4, 1, 2], 24, 3), ([0, 0, 0, 0], 12, 3), ([3, 1, 4, 1, 0], 1, 3), ([2], 7, 3), ([1, 2, 3], 6, 0),
         ([0, 0, 1, 1], 8, 3), ([4, 2], 0, 3))


def _dtype(setting: Setting) -> str:
    return setting.dtype if setting.dtype in ("float32", "bfloat16") else "float32"


def _ids(setting: Setting) -> list[int]:
    """A prompt in which something stands twice."""
    return (setting.ids(8) * 2)[:60]


@exercise("my_propose", "15", takes="token_ids, count", patches=at("tplab.engine.scheduler.propose"),
          agreed="every guess is what followed the longest ending that stood there before; with them, the text on "
                 "{ranks} is plain greedy's")
def my_propose(attempt: Attempt, setting: Setting):
    """Short texts first, of few tokens, so that endings of three, two, one and none stood before; then the engine."""
    texts, found = [*_repetitive()], []
    for tokens, count in texts:
        with saying(f"tokens {tokens}, count {count}: "):
            found.append(tuple(whole_numbers(attempt(list(tokens), count), "the guesses")))
    right = [propose(*text) for text in texts]
    if found != right:
        wrong = [each for each in zip(texts, found, right) if each[1] != each[2]]  # more says one of unlike tokens
        (tokens, count), guess, one = min(wrong, key=lambda each: (not each[0][1], len({*each[0][0]}) < 3))
        raise NotYet(f"tokens {tokens}, count {count}: it guesses {list(guess)}, and {list(one)} is right\n"
                     + _why(found, texts, tokens, count))
    with saying("tokens [], count 3: "):
        if guess := whole_numbers(attempt([], 3), "the guesses"):
            raise NotYet(f"it guesses {guess}, and [] is right")
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


def _repetitive() -> Iterator[tuple[list[int], int]]:
    """Texts and how many guesses are asked for. Token 12 is no 1 and 2, and no 112."""
    generator = torch.Generator().manual_seed(0)
    for size in range(1, 21):
        for kinds in (2, 3, 4, 5, 2, 3) * (1 + size // 8):
            letters = torch.tensor([1, 2, 12, 112, 21])[torch.randperm(5, generator=generator)[:kinds]]
            yield (letters[torch.randint(kinds, (size,), generator=generator)].tolist(),
                   int(torch.randint(6, (1,), generator=generator)))


def _by(tokens: list[int], count: int, lengths=(3, 2, 1), which: Callable = max, apart: Callable = lambda length: 1,
        follows: Callable = lambda rest, length, count: rest[length:][:count], begin: int = 0) -> tuple[int, ...]:
    """What is guessed by a mistake: by endings of other lengths, at another place, from ``begin`` on and as far
    ``apart`` from the ending; and what follows, of the text's ``rest`` from that place on."""
    for length in lengths:
        ending = tokens[max(0, len(tokens) - length):]
        if places := [at for at in range(begin, len(tokens) - length - apart(length) + 1)
                      if tokens[at:at + length] == ending]:
            return tuple(follows(tokens[which(places):], length, count))
    return ()


# What a wrong answer does, if it guesses what comes of that wherever a guess is asked for.
_RULES = {
    "endings of three tokens are tried first": {"lengths": (2, 1)}, "a single token is an ending, too": {
        "lengths": (3, 2)}, "where the last three tokens are not found, the last two are tried": {"lengths": (3, 1)},
    "where the last three tokens are not found, two and one are tried": {"lengths": (3,)},
    "where the last two tokens are not found, the last one is tried": {"lengths": (2,)},
    "the last three tokens say more than the last one: the longest ending comes first": {"lengths": (1,)},
    "three tokens are the most": {"lengths": (4, 3, 2, 1)},
    "of several places, the last counts": {"which": min},
    "a place may overlap the ending: it only has to begin before it": {"apart": lambda length: length},
    "the ending itself is no earlier place": {"apart": lambda length: 0},
    "a place can be the first token of the text": {"begin": 1},
    "it begins with the ending itself; only what followed is asked for": {
        "follows": lambda rest, length, count: rest[:length + count]},
    "that is the ending itself: what followed it, where it stood before?": {
        "follows": lambda rest, length, count: rest[:count]},
    "what followed ends `count` tokens behind the ending, not behind its first token": {
        "follows": lambda rest, length, count: rest[length:count]},
    "that is more than `count`": {"follows": lambda rest, length, count: rest[length:]},
    "a text that ends before gives fewer guesses": {
        "follows": lambda rest, length, count: (rest[length:][:count] + [0] * count)[:count]}}


def _why(found: list[tuple[int, ...]], texts: list[tuple[list[int], int]], tokens: list[int], count: int) -> str:
    if not count:
        return "count is 0: no guess is asked for"
    fits = [says for says, rule in _RULES.items()
            if all(guess == _by(*text, **rule) for guess, text in zip(found, texts) if text[1])]
    if len(fits) == 1:
        return fits[0]
    for length in (3, 2, 1):
        if places := [at for at in range(len(tokens) - length) if tokens[at:at + length] == tokens[-length:]]:
            return (f"its ending {tokens[-length:]} stood there before, from token {places[-1]} on" + (
                " (a place may overlap the ending)" * (places[-1] > len(tokens) - 2 * length)))
    return "nothing of its ending stood there before: there is no guess, []"


class Toy(Uncopied):
    """The model's choice behind a token depends on all tokens in the cache up to it; all calls are kept, each with how
    many of its last tokens are guesses, and how often these were asked for by then."""

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
        guessed = next(count for count in range(min(len(self.guess), len(new_ids) - 1), -1, -1)
                       if new_ids[len(new_ids) - count:] == self.guess[:count])
        self.calls.append((new_ids, positions, guessed, len(self.asked)))
        if len(self.calls) > 100:
            again = ", as the one before" * (self.calls[-2][:2] == (new_ids, positions))
            raise NotYet("step has been called 100 times by now: what ends the loop? The latest call is given "
                         f"{new_ids[:4]} at positions {positions[:4]}{again}")
        return chosen

    def choice(self, tokens: list[int]) -> int:
        again = len(tokens) % 12 and len(tokens) > 3  # so guesses of all lengths stay, and of all lengths do not
        return tokens[-4] if again else (3 * sum(tokens) + len(tokens)) % 5

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


@exercise("my_speculate", "15", takes="step, propose, ids, count", right=speculate,
          agreed="no rejected token stays, in the text or in the cache; on {ranks}, the text is plain greedy's")
def my_speculate(attempt: Attempt, setting: Setting):
    """A toy whose cache remembers what it was given; then the model on its ranks."""
    for ids, count, guesses in LOOPS:
        toy, right = Toy(guesses), Toy(guesses)
        speculate(right, right.propose, list(ids), count)
        with saying(f"prompt {ids}, {count} new, at most {guesses} guesses: "):
            try:
                found = attempt(toy, toy.propose, list(ids), count)
            except NotYet:
                _judge_calls(toy, toy.goes_on(ids, 200), len(ids) + count)
                raise
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


def _judge_calls(toy: Toy, text: list[int], total: int) -> tuple[dict[int, int], str]:
    """:class:`NotYet` unless each call goes on with the text; what was tried in vain, by position, and which call is
    the first to begin where the cache holds a right token, or when the text has all its ``total`` tokens."""
    have, rejected, again = 0, {}, ""  # how much of the text is in the cache; what else was tried at a position
    for number, (new, positions, guessed, asked) in enumerate(toy.calls, 1):
        said, first = f"call {number} ", positions[0]
        given, places, tried, earlier = toy.calls[number - 2] if number > 1 else ([], [], 0, 0)
        stale = guessed and number > 1 and asked == earlier
        before = f"\nCall {number - 1} tried {given[-tried:]} from position {places[-tried]} on; the text has " + (
            f"{text[places[-tried]:][:tried]} there") if tried else ""
        if positions != list(range(first, first + len(new))):
            raise NotYet(f"{said}has positions {positions[:6]}; they follow each other")
        mine = toy.asked[asked - 1] if asked else []
        if first > have and mine[have:have + 1] not in ([], [text[have]]):
            raise NotYet(f"before call {number}, your text has {mine[have]} at position {have}, where the model chose "
                         f"{text[have]}{before}")
        if first > have:
            raise NotYet(f"{said}begins at position {first}, and " + (
                f"position {have} holds a guess that was rejected: its key has to be computed anew"
                if have in rejected else f"the cache holds {have} tokens of the text: which is the next?"))
        if not again and (have + 1 >= total or first < have):
            again = (f"before {said}your text has {len(mine)} tokens, where {have + 1} are known: call {number - 1} "
                     f"gives {'the guesses up to the first wrong one, and ' * bool(tried)}the model's choice{before}"
                     if asked > earlier and mine == text[:min(len(mine), have)] else
                     said + ("comes when all tokens are there" if have + 1 >= total else f"begins at position {first}, "
                             f"and the cache holds {have} tokens of the text: they stay there"))
        right_ones = next((at for at, pair in enumerate(zip(new, text[first:])) if pair[0] != pair[1]), len(new))
        at = first + right_ones
        if right_ones < len(new) - guessed or stale and right_ones < len(new):
            raise NotYet(f"{said}is given {new[right_ones]} at position {at}, where the text has {text[at]}" + (
                f"\nIts guesses, {new[-guessed:]}, were made before an earlier call: ask before every step" if stale
                else f"\n{new[right_ones]} was a guess there, and the model chose {text[at]}: it must go"
                if rejected.get(at) == new[right_ones] else
                f"\nThese are the tokens of position {have} on" if new[:1] == text[have:have + 1] and first != have else
                before))
        have = max(have, at) if right_ones == len(new) else at
        rejected |= dict(enumerate(new[right_ones:], at))
    return rejected, again


def _judge_loop(toy: Toy, right: Toy, found, ids: list[int], count: int) -> None:
    found, text = whole_numbers(found, "the new ids"), toy.goes_on(ids, count + toy.guesses + 1)
    if not toy.calls and count:
        raise NotYet("step is never called: whose tokens are these?")
    rejected, again = _judge_calls(toy, text, len(ids) + count)
    theirs = text[len(ids):len(ids) + count]
    if found[:len(ids)] == ids and len(found) == len(ids) + count:
        raise NotYet("the prompt comes back too; only the new ids are asked for")
    if found != theirs:
        same = next((at for at, pair in enumerate(zip(found, theirs)) if pair[0] != pair[1]), None)
        if same is None:
            raise NotYet(f"{len(found)} ids come back, and {count} are asked for" + (
                ": an accepted guess can be one too many" if len(found) > count else ", whichever they are"))
        if begins := [at for at in range(len(text)) if text[at:at + count] == found]:
            at = min(begins, key=lambda at: abs(at - len(ids)))
            raise NotYet(f"these are the tokens from position {at} on, and the new ones begin at {len(ids)}")
        raise NotYet(f"new token {same} is {found[same]}, and greedy decoding has {theirs[same]} there" + (
            f"\n{found[same]} was a guess that the model rejected" * (rejected.get(len(ids) + same) == found[same])))
    other = next((after for before, after in pairwise([[], *toy.asked]) if len(before) < len(ids) + count and (
        len(after) <= len(before) or after != text[:len(after)])), None)
    if other is not None:
        raise NotYet(f"the text is right, and propose is given {len(other)} tokens, {other[:6]} …, where the text so "
                     "far must be given")
    if again:
        raise NotYet(f"the text is right, and {again}")
    enough, asked = len(right.calls), f"propose is asked {counted(len(toy.asked), 'time')}"
    if len(toy.calls) > enough:
        raise NotYet(f"the text is right and took {counted(len(toy.calls), 'call')}, where {enough} are enough. " + (
            "No token is asked for" if not count else
            f"{asked}: it is asked before every call, also before the first" if len(toy.asked) < len(toy.calls) else
            "A call gives the accepted guesses and one token more"))
