"""Notebook 09: seven cures of patient zero, each judged by what that engine makes with it: the check's report, or the
text and how many tokens were computed for it. It must be what the lab's own cure makes: Hugging Face's."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from unittest import mock

import torch

from course.judge.exercise import Exercise
from course.judge.setting import in_learners_words
from course.judge.words import NotYet, first_cause, in_words
from tplab.errors import TplabError

if (_NOTEBOOKS := str(Path(__file__).resolve().parents[2])) not in sys.path:
    sys.path.append(_NOTEBOOKS)  # where patient zero lies, on the ranks too


class _Late:
    """A module of patient zero that is loaded by its first use: the other notebooks need none."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str):
        return getattr(import_module(self._name), name)


attention, linear = _Late("patient_zero.attention"), _Late("patient_zero.linear")


def with_cures(cures: Mapping[str, Callable], function: Callable, *args):
    """``function(*args)`` while each of ``cures`` stands in the place of the function of ``patient_zero`` so called."""
    with ExitStack() as stack:
        for name, cure in cures.items():
            stack.enter_context(mock.patch(f"patient_zero.{name}", cure))
        return function(*args)


def apply_causal_mask(scores):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf"))


def shard_weight(loaded, start, size, hidden_size):
    return loaded.narrow(0, start, size)


def apply_rope(rotary_emb, position_ids, q, k):
    cos, sin = rotary_emb(q, position_ids)
    return attention.apply_rotary_pos_emb(q, k, cos, sin)


def generate(self, input_ids, max_new_tokens):
    new_ids, kv_caches = [], None
    tokens, positions = torch.tensor([input_ids]), torch.arange(len(input_ids))[None]
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits, kv_caches = self(tokens, positions, kv_caches)
            tokens, positions = logits[:, -1:].argmax(dim=-1), positions[:, -1:] + 1
            new_ids.append(tokens.item())
    return new_ids


def extend_cache(kv_cache, k, v, num_repeats):
    if kv_cache is not None:
        k, v = (torch.cat([cached, new], dim=2) for cached, new in zip(kv_cache, (k, v)))
    return k.repeat_interleave(num_repeats, dim=1), v.repeat_interleave(num_repeats, dim=1), (k, v)


def share(total):
    size, rest = divmod(total, linear.tp_size())
    rank = linear.tp_rank()
    return rank * size + min(rank, rest), size + (rank < rest)


def kv_share(num_heads, num_kv_heads):
    first, count = linear.share(num_heads)
    read = torch.arange(first, first + count) // (num_heads // num_kv_heads)
    heads, repeats = read.unique(return_counts=True)
    return heads[0].item(), len(heads), repeats


def in_patient_zero(cure: Callable, place: str, setting, answer) -> None:
    """``setting.engine(cures)`` runs patient zero with these besides those found so far, on the notebook's ranks."""
    if setting.engine is None:
        raise NotYet("a cure is judged in patient zero, as notebook 09 does it with engine=…")
    # The cache of `generate` is a right one: the engine's own has a bug that shows as soon as it is read.
    beside = {"attention.extend_cache": extend_cache} if cure is generate else {}
    try:
        ours = setting.engine({place: answer, **beside})
    except TplabError as error:
        raise NotYet(f"in the engine, {in_words(first_cause(error))}") from error
    right = setting.engine({place: cure, **beside})
    if not isinstance(right, tuple):
        found = _said(ours)
        if wrong := found.keys() - _said(right).keys():
            raise NotYet(f"in the engine: {next(said for key, said in found.items() if key in wrong)}")
        return
    (tokens, computed), (wanted, enough) = ours, right
    if list(tokens) != list(wanted):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, wanted)))
        raise NotYet(f"in the engine, {same} of {len(wanted)} tokens are Hugging Face's")
    if sum(computed) > sum(enough):
        raise NotYet(f"in the engine, the text is right, and {sum(computed):,} tokens are computed for it; "
                     f"{sum(enough):,} are enough: is the cache used?")


def _said(report) -> dict:
    """What a check's report finds wrong: ``{(point, name): sentence}``."""
    found = {(one.point, one.fault): in_learners_words(one) for one in report.diagnoses}
    found |= {(one, None): one for one in (*report.recording.contradictions, *report.stopped)}
    return found | {(point, ""): f"{point} is not what its own inputs give" for point in report.guilty}


_AGREED = {"generate": "the text is Hugging Face's, and every token is computed once",
           "extend_cache": "the text is Hugging Face's, with the cache read"}
EXERCISES = [Exercise("09", cure, agreed=_AGREED.get(cure.__name__, "in the engine, what it mends is Hugging Face's"),
                      engine=partial(in_patient_zero, cure, place)) for place, cure in {
    "attention.apply_causal_mask": apply_causal_mask, "linear.shard_weight": shard_weight,
    "attention.apply_rope": apply_rope, "model.TensorParallelModel.generate": generate,
    "attention.extend_cache": extend_cache, "linear.share": share, "linear.kv_share": kv_share}.items()]
