"""Notebook 15: a loop that keeps of several guesses what the model would have chosen; blocks that others may find."""

import torch

from course.exercises.own_engine import listed
from course.judge.answers import greedy
from course.judge.exercise import Example, Exercise
from course.judge.words import NotYet
from course.judge.work import whole_numbers
from tplab.cache import Segment, blocks_needed
from tplab.engine.config import EngineConfig
from tplab.engine.draft import propose
from tplab.engine.sampler import best_offer, offer
from tplab.faults import scenario
from tplab.invariant import make_runner
from tplab.model.dtypes import parse_dtype
from tplab.patch import Patch, original
from tplab.shard import ShardPlan

COUNT, DRAFT = 24, 4  # tokens of a text, guesses of a step
UPDATE = "tplab.engine.scheduler.Scheduler.update_from_output"


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
    """The model's choice after a token depends on all tokens in the cache up to it; all calls are kept."""

    def __init__(self, guesses: int, ids: list[int]):
        self.cache, self.calls, self.guesses, self.asked = {}, [], guesses, []
        self.ids, self.text, self.prompt = ids, list(ids), len(ids)
        self.have = 0  # tokens of the text that are in the cache

    def __call__(self, new_ids, positions) -> list[int]:
        new_ids, positions = listed("new_ids", new_ids), listed("positions", positions)
        if self.ids != self.text[:self.prompt]:
            raise NotYet("ids has been changed, and the caller still needs it: begin with text = list(ids)")
        if len(new_ids) != len(positions) or not new_ids:
            raise ValueError(f"step was given {len(new_ids)} tokens and {len(positions)} positions")
        if positions[0] > self.have:
            raise NotYet(f"call {len(self.calls) + 1} begins at position {positions[0]}, and the cache holds only "
                         f"{self.have} tokens of the text")
        text = self.greedy(self.have + 1 if self.calls else self.prompt)
        for token, p in zip(new_ids, positions):
            if p < len(text) and token != text[p]:
                raise NotYet(f"call {len(self.calls) + 1} computes token {token} at position {p}, where the text has "
                             f"{text[p]}")
        self.cache.update(zip(positions, new_ids))
        choices = [self.choice([self.cache.get(p, 0) for p in range(position + 1)]) for position in positions]
        self.calls.append((new_ids, positions, choices))
        if len(self.calls) > 100:
            raise NotYet("step has been called 100 times by now: what ends the loop? The latest call is given "
                         f"{new_ids[:4]} at positions {positions[:4]}")
        while self.cache.get(self.have) == self.greedy(self.have + 1)[-1]:
            self.have += 1
        return list(choices)

    def greedy(self, count: int) -> list[int]:
        """The first ``count`` tokens of the text that plain greedy decoding writes."""
        while len(self.text) < count:
            self.text.append(self.choice(self.text))
        return self.text[:count]

    def choice(self, tokens: list[int]) -> int:
        again = len(tokens) % 12 and len(tokens) > 3  # so guesses of all lengths are right, and of all lengths are not
        return tokens[-4] if again else (3 * sum(tokens) + len(tokens)) % 5

    def propose(self, token_ids) -> list[int]:
        tokens, text = listed("token_ids", token_ids), self.greedy(self.have + 1 if self.calls else self.prompt)
        if tokens != text:
            after = "after call {} computes {} and gives {}, ".format(len(self.calls), *self.calls[-1][::2]) if (
                self.calls) else ""
            same = len(self.asked[-1]) if self.asked and tokens[:len(self.asked[-1])] == self.asked[-1] else 0
            raise NotYet(f"{after}guesses are asked for a text to which {tokens[same:]} was added, and {text[same:]} "
                         "is right")
        self.asked.append(tokens)
        return list(propose(tokens, self.guesses))


def guessed(answer, ids, count, guesses):
    """Each call goes on where the cache ends; the text is greedy decoding's."""
    toy, prompt, have = Toy(guesses, ids), list(ids), 0
    text = toy.greedy(len(ids) + count + guesses + 1)
    new_ids = whole_numbers(answer(toy, toy.propose, ids, count), "the new ids")
    for number, (new, positions, _) in enumerate(toy.calls, 1):
        yield f"call {number} begins at position", positions[0], have
        yield f"call {number} has positions", positions, [*range(have, have + len(new))]
        have += next((n for n, pair in enumerate(zip(new, text[have:])) if pair[0] != pair[1]), len(new))
    yield "the number of new ids is", len(new_ids), count
    yield "it returns", new_ids, text[len(prompt):len(prompt) + count]
    if toy.asked:
        yield "guesses are first asked for when the text has tokens:", len(toy.asked[0])
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
    new_ids, calls = setting.on_ranks(on_a_rank, answer, ckpt, size, dtype, ids)[0]
    if new_ids != greedy(ckpt, [ids], COUNT, size, dtype, batch_invariant=True)[0]:
        raise NotYet("in the engine, the text is not plain greedy's, though the toy's was right: what is different "
                     "with other tokens?")
    return f"{COUNT} tokens took {calls} steps instead of {COUNT}" if calls < COUNT else ""


def my_full_blocks(have, draft, chosen, block_size):
    kept = 0
    while kept < len(draft) and draft[kept] == chosen[kept]:
        kept += 1
    return (have + 1 + kept) // block_size


def drafts():
    for have, draft, chosen, size in (
            (5, [7, 8, 9], [7, 3, 9, 4], 4), (5, [7, 8, 9], [7, 8, 3, 4], 4), (4, [7, 8, 9], [7, 8, 9, 4], 4),
            (8, [], [5], 4), (0, [], [1], 2),
            (11, [1, 2, 3, 4], [9, 2, 3, 4, 5], 4), (2, [6, 1], [6, 2, 1], 5), (4, [5, 5], [5, 5, 5], 2),
            (6, [1, 2, 3], [1, 9, 3, 4], 3)):
        yield Example(have, draft, chosen, size)


def published_by(answer) -> list[Patch]:
    """The engine's scheduler, with as many blocks in the prefix cache as the answer says."""
    def update_from_output(self, scheduler_output, runner_output):
        for request in scheduler_output.requests:
            kept = runner_output.num_accepted.get(request.request_id, 0)
            drawn = runner_output.sampled_token_ids.get(request.request_id, -1)
            sequence, rest = self.requests[request.request_id], [-1] * (len(request.draft) - kept)
            have = request.segment.start + request.segment.count - len(request.draft) - 1
            blocks = answer(have, list(request.draft), [*request.draft[:kept], drawn, *rest], self.pool.block_size)
            tokens = [*sequence.token_ids, *request.draft]
            sequence.block_table.cache_blocks(tokens, blocks * self.pool.block_size)
        return original(UPDATE)(self, scheduler_output, runner_output)

    return [Patch(UPDATE, update_from_output)]


def found_by_others(setting, answer):
    setting.align(decode=True, **scenario("rejected_draft_findable", setting.checkpoint.config.vocab_size))


# The guesses that are kept, counted wrongly: edits of the loop that both references have.
_NO_LOOP = "while kept -> while False and kept"
_SHIFTED = "draft[kept] == chosen[kept] -> draft[kept] == chosen[kept + 1]"
_ALL_OR_NONE = f"kept = 0 -> kept = len(draft) * (draft == chosen[:len(draft)]) ;; {_NO_LOOP}"
_ANYWHERE = f"kept = 0 -> kept = sum(a == b for a, b in zip(draft, chosen)) ;; {_NO_LOOP}"
EXERCISES = [
    Exercise("15", my_speculate, lambda: [
        Example(*case, says=f"prompt {case[0]}, {case[1]} new, at most {case[2]} guesses") for case in (
            ([1, 2, 3, 4, 1, 2], 24, 3), ([0, 0, 0, 0], 12, 3), ([3, 1, 4, 1, 0], 1, 3), ([2], 7, 3), ([1, 2, 3], 6, 0),
            ([0, 0, 1, 1], 8, 3), ([4, 2], 0, 3))], {
        "the text is right, but takes more steps than it needs: use the guesses that are accepted, and stop when "
        "count tokens are there": ("propose(text) -> []", "propose(text) -> propose(text) and []"),
        "rejected guesses are counted as tokens in the cache; their keys have to be computed anew":
            "have = len(text) - 1 -> have += len(new)",
        "everything is computed again: the keys of the text's tokens but the last are in the cache":
            "have = len(text) - 1 -> have = 0",
        "accepted guesses are computed again: their keys are in the cache": "len(text) - 1\n -> len(text) - 1 - kept\n",
        "the first step has no guesses: ask for them before it, too": "propose(text) -> propose(text) if have else []",
        "the model's own choice after the accepted guesses belongs to the text, too":
            ("draft[:kept] + [chosen[kept]] -> draft[:kept] or [chosen[kept]]",
             "draft[:kept] + [chosen[kept]] -> draft[:kept] or [chosen[kept]] ;; len(text) - 1\n -> len(text)\n"),
        "the last step can give more tokens than are needed: cut them off": "len(ids) + count] -> ]",
        "the choice after the last guess is taken: it is right only if all guesses before it are":
            "draft[:kept] + [chosen[kept]] -> draft[:kept] + [chosen[-1]]",
        "a rejected guess stays in the text": (
            "draft[:kept] + [chosen[kept]] -> draft + [chosen[kept]]",
            "draft[:kept] + [chosen[kept]] -> draft + [chosen[-1]]",
            "draft[:kept] + [chosen[kept]] -> draft[:kept] + (draft[kept:kept + 1] or [chosen[kept]])"),
        "after the accepted guesses comes one choice: later ones follow a wrong guess":
            "draft[:kept] + [chosen[kept]] -> draft[:kept] + chosen[kept:]",
        "the guesses are compared with the choices from the first on: the newest token's choice is at another index":
            "[len(text) - 1 - have:] -> ",
        "a guess is compared with the choice after it; its own is the one after the token before it": _SHIFTED,
        "the guesses before the first wrong one are kept, too": (_ALL_OR_NONE, _NO_LOOP),
        "a guess after a wrong one is used: the model chose it after a text with a wrong token": (
            _ANYWHERE,
            "draft[:kept] + [chosen[kept]] -> [a for a, b in zip(draft, chosen) if a == b] + [chosen[kept]]"),
    }, "no rejected token stays, in the text or in the cache; on {ranks}, the text is plain greedy's", guessed,
             engine=in_the_engine),
    Exercise("15", my_full_blocks, drafts, {
        "rejected guesses are counted: another request would find their keys": "1 + kept -> 1 + len(draft)",
        "the model's choice after the guesses is counted, and its key is not yet computed": "1 + kept -> 2 + kept",
        "all guesses are counted, and the newest token is not": "have + 1 + kept -> have + len(draft)",
        "only whole blocks can be found: divide by //": "// block_size -> / block_size",
        "the accepted guesses are computed and belong to the text: they are not counted": "1 + kept -> 1",
        "the newest token is computed in this step, too":
            ("have + 1 + kept -> have + kept", "have + 1 + kept -> have + kept - 1"),
        "all blocks count, from the first one on, and not only the new ones":
            "(have + 1 + kept) // block_size -> (have + 1 + kept) // block_size - have // block_size",
        "a block that is not yet full is counted": "(have + 1 + kept) // -> (have + kept + block_size) //",
        "a guess is compared with the choice after it; chosen[0] is the first guess's": _SHIFTED,
        "the guesses before the first wrong one are kept, too": _ALL_OR_NONE,
        "a guess after a wrong one is counted: the model chose it after a text with a wrong token":
            _ANYWHERE,
    }, "only blocks of accepted tokens can be found; on {ranks}, a second prompt that contains rejected guesses agrees "
       "with Hugging Face", patches=published_by, engine=found_by_others)]
