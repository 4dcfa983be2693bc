"""The exercises of notebook 09: three functions of patient zero, each judged on a small example, then in the engine.

Patient zero (``notebooks/patient_zero``) knows nothing of the lab. A *cure* is a function that takes the place of one
of its own, by dotted name, for as long as a call on the ranks lasts; its files stay as they are.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from unittest import mock

import torch

from tplab.lesson.exercise import check
from tplab.shard import split_evenly


def with_cures(cures: Mapping[str, Callable], function: Callable, *args):
    """``function(*args)`` while each name of ``cures``, below ``patient_zero``, stands for the function given with it.

        >>> pool.run(lesson.with_cures, {"attention.apply_causal_mask": right}, write)
    """
    with ExitStack() as stack:
        for name, cure in cures.items():
            stack.enter_context(mock.patch(f"patient_zero.{name}", cure))
        return function(*args)


def apply_rope(rotary_emb, position_ids, q, k):
    """Rotation as Hugging Face does it: the tables are laid over heads, the last two axes are tokens and head_size."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    cos, sin = rotary_emb(q, position_ids)
    return apply_rotary_pos_emb(q, k, cos, sin)


def generate(self, input_ids, max_new_tokens):
    """The prompt in one call, then one token a call, at the next position, with the cache of the call before."""
    new_ids, kv_caches = [], None
    tokens, positions = torch.tensor([input_ids]), torch.arange(len(input_ids))[None]
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits, kv_caches = self(tokens, positions, kv_caches)
            tokens, positions = logits[:, -1:].argmax(dim=-1), positions[:, -1:] + 1
            new_ids.append(tokens.item())
    return new_ids


def extend_cache(kv_cache, k, v, num_repeats):
    """New keys and values behind the cached ones; KV heads are stored, and repeated for attention only."""
    if kv_cache is not None:
        k, v = (torch.cat([cached, new], dim=2) for cached, new in zip(kv_cache, (k, v)))
    return k.repeat_interleave(num_repeats, dim=1), v.repeat_interleave(num_repeats, dim=1), (k, v)


def kv_share(num_heads, num_kv_heads):
    """The KV heads that this rank's query heads read, and how many of its query heads read each."""
    from patient_zero import linear

    first, count = linear.share(num_heads)
    read = torch.arange(first, first + count) // (num_heads // num_kv_heads)
    heads, repeats = read.unique(return_counts=True)
    return heads[0].item(), len(heads), repeats


def check_rope(function: Callable, examine: Callable) -> Callable:
    """Judge a learner's ``apply_rope(rotary_emb, position_ids, q, k)``.

    As the other two checks: prints one line, ``PASS`` or ``NOT YET`` with what to look at, and returns the function
    with which the notebook goes on: the learner's if it passed, else the lab's own.

    ``examine(cures)``: records patient zero with these cures besides those found so far; returns the check's report.

        >>> cures["attention.apply_rope"] = lesson.check_rope(apply_rope, examine)
    """
    def in_engine():
        report = examine({"attention.apply_rope": function})
        first = report.first_divergence
        return f"in the engine, {_sentence(report)}" if first and first.name.startswith("layers.") else ""

    return _judge(function, apply_rope, rope_problem, in_engine, "no layer leaves Hugging Face any more")


def check_generate(function: Callable, text_of: Callable, right: list[int]) -> Callable:
    """Judge a learner's ``generate(self, input_ids, max_new_tokens)``; see :func:`check_rope`.

    ``text_of(cures)``: the new ids that patient zero writes; ``right``: those of Hugging Face. It gets a right cache
    along with the function, for its own has a bug that shows as soon as it is read.
    """
    def in_engine():
        found = text_of({"model.TensorParallelModel.generate": function, "attention.extend_cache": extend_cache})
        agree = next((i for i, pair in enumerate(zip(found, right)) if pair[0] != pair[1]), len(right))
        return "" if list(found) == right else f"in the engine, {agree} of {len(right)} tokens are Hugging Face's"

    return _judge(function, generate, generate_problem, in_engine, "every token computed once, the text Hugging Face's")


def check_kv_share(function: Callable, examine: Callable) -> Callable:
    """Judge a learner's ``kv_share(num_heads, num_kv_heads)``; see :func:`check_rope`. ``examine`` uses three ranks."""
    def in_engine():
        report = examine({"linear.kv_share": function})
        return "" if report.verdict == "clean" else f"in the engine, {_sentence(report)}"

    return _judge(function, kv_share, kv_share_problem, in_engine, "every query head reads its own KV head")


def rope_problem(function: Callable) -> str:
    """What is wrong with it, seen on 4 query and 2 KV heads at positions 5 to 10; the empty string if nothing is."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2RotaryEmbedding

    tables = Qwen2RotaryEmbedding(Qwen2Config(hidden_size=32, num_attention_heads=4, num_hidden_layers=1))
    q, k = torch.arange(192.0).sin().view(1, 4, 6, 8), torch.arange(96.0).cos().view(1, 2, 6, 8)
    positions = torch.arange(5, 11)[None]
    if problem := _swallows(function, q, k, positions):
        return problem
    found = function(tables, positions, q.clone(), k.clone())
    if not isinstance(found, tuple | list) or len(found) != 2 or not all(isinstance(t, torch.Tensor) for t in found):
        return f"it returns {_kind(found)}; q and k must come back, in this order"
    right = apply_rope(tables, positions, q, k)
    counted = apply_rope(tables, positions - 5, q, k)
    for name, ours, truth, restarted, before in zip("qk", found, right, counted, (q, k)):
        if ours.shape != before.shape:
            return (f"{name} goes in as {list(before.shape)} and comes back as {list(ours.shape)}; attention "
                    "expects heads before tokens, as before")
        if ours.equal(before):
            return f"{name} comes back as it went in: nothing was turned"
        if torch.allclose(ours, restarted, atol=1e-5):
            return f"{name} is turned as if positions began at 0; position_ids say 5 to 10"
        if not torch.allclose(ours.norm(dim=-1), before.norm(dim=-1), atol=1e-4):
            return f"{name} changes its lengths, so it was not turned: which axis of {name} do cos and sin lie on?"
        if not torch.allclose(ours, truth, atol=1e-5):
            return f"{name} is turned, but not by Hugging Face's angles: which function does cos and sin belong to?"
    return ""


def _swallows(function, q, k, positions):
    def broken_tables(x, position_ids):
        asked.append(position_ids)
        raise ArithmeticError("no tables")

    asked = []
    try:
        function(broken_tables, positions, q, k)
    except ArithmeticError:
        return ""
    return ("the tables raised an exception and nobody heard of it: a rotation that fails must stop the engine" if asked
            else "rotary_emb, which gives cos and sin, is never asked")


class _ToyModel:
    """Calls like patient zero's model; the next token depends on all earlier ones and on where they stood."""

    vocab = 50

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, position_ids=None, kv_caches=None):
        if input_ids.dim() != 2 or len(input_ids) != 1:
            raise ValueError(f"input_ids must be [1, tokens], not {list(input_ids.shape)}")
        count = input_ids.shape[1]
        positions = torch.arange(count) if position_ids is None else torch.as_tensor(position_ids).reshape(-1)
        held = kv_caches[0][0].shape[2] if kv_caches else 0
        self.calls.append((count, positions.tolist(), held))
        if len(positions) != count:
            raise ValueError(f"{count} tokens and {len(positions)} positions")
        keys = (input_ids[0] + 7 * positions).view(1, 1, -1, 1).float()
        if kv_caches:
            keys = torch.cat([kv_caches[0][0], keys], dim=2)
        sums = keys.flatten().cumsum(0)[-count:].long()
        logits = torch.nn.functional.one_hot(sums % self.vocab, self.vocab)[None].float()
        return logits, [(keys, keys)]

    forward = __call__


def generate_problem(function: Callable) -> str:
    """What is wrong with it, seen on five tokens and four new ones; the empty string if nothing is."""
    prompt, toy, reference = [3, 1, 4, 1, 5], _ToyModel(), _ToyModel()
    right = generate(reference, prompt, 4)
    found = function(toy, list(prompt), 4)
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        return f"it returns {_kind(found)}; a list of whole numbers must come back, the new ids"
    for number, (count, positions, held) in enumerate(toy.calls):
        have = f"call {number + 1} for a prompt of 5 tokens"
        if number == 0 and count != 5:
            return f"{have} computes {count} tokens; the whole prompt comes first, in one call"
        if number and not held:
            return f"{have} is given no cache: who keeps what the call before returned?"
        if number and count > 1:
            return f"{have} computes {count} tokens, though {held} are in the cache: only the newest one is new"
        if held != (4 + number if number else 0):
            return f"{have} is given a cache of {held} tokens; after call {number} it holds {4 + number}"
        if positions[0] != held:
            return (f"{have} says position {positions[0]}; {held} tokens come before, so it is {held} (without "
                    "position_ids the model counts from 0)")
    if len(found) != 4:
        among = ", the prompt among them" * (found[:5] == prompt)
        return f"4 new tokens were asked for, {len(found)} came back{among}"
    return "" if found == right else (f"calls and positions are right, but {found} came back instead of {right}: the "
                                      "argmax of which row is the next token?")


_LAYOUTS = [(8, 2, 2), (8, 2, 4), (8, 2, 3), (9, 3, 2), (14, 2, 4), (6, 6, 4), (7, 1, 3)]


def kv_share_problem(function: Callable) -> str:
    """What is wrong with it, seen on seven layouts of heads; the empty string if nothing is."""
    from patient_zero import linear

    for num_heads, num_kv_heads, ranks in _LAYOUTS:
        group = num_heads // num_kv_heads
        for rank in range(ranks):
            with mock.patch.multiple(linear, tp_rank=lambda rank=rank: rank, tp_size=lambda ranks=ranks: ranks,
                                     share=lambda total, rank=rank, ranks=ranks: _even(total, rank, ranks)):
                found = function(num_heads, num_kv_heads)
            have = f"{num_heads} query and {num_kv_heads} KV heads, rank {rank} of {ranks}: "
            if not isinstance(found, tuple) or len(found) != 3:
                return f"it returns {_kind(found)}; first KV head, how many, how often each is repeated"
            first, count, repeats = found
            try:
                held = torch.arange(int(first), int(first) + int(count)).repeat_interleave(repeats).tolist()
            except (TypeError, ValueError, RuntimeError):
                return f"{have}repeat_interleave does not take {found}; repeats is a number or a tensor of {count}"
            start, heads = _even(num_heads, rank, ranks)
            wanted = [head // group for head in range(start, start + heads)]
            mine = f"query heads {start}–{start + heads - 1}" if heads > 1 else f"query head {start}"
            if len(held) != heads:
                return f"{have}{mine} are {heads}, but {len(held)} repeated KV heads stand beside them"
            if held != wanted:
                at = next(i for i in range(heads) if held[i] != wanted[i])
                return f"{have}query head {start + at} reads KV head {held[at]}, and its own is {wanted[at]}"
            if int(count) != len(set(wanted)):
                return f"{have}{mine} read {len(set(wanted))} KV heads, and it holds {int(count)}"
    return ""


def _even(total, rank, ranks):
    part = split_evenly(total, ranks)[rank]
    return part.start, len(part)


def _judge(function, right, problem, in_engine, agreed):
    name = getattr(function, "__name__", repr(function))
    try:
        hint = problem(function) or in_engine()
    except Exception as error:
        hint = f"{type(error).__name__}: {error}".splitlines()[0]
    check(name if hint else f"{name}: {agreed}", not hint, hint)
    return right if hint else function


def _sentence(report):
    """What the check found first."""
    return next(iter([*(one.sentence for one in report.diagnoses), *report.recording.contradictions,
                      *report.open_questions]))


def _kind(value):
    return "nothing" if value is None else f"{len(value)} things" if isinstance(value, tuple) else type(value).__name__
