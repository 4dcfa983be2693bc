"""Notebook 09: seven functions of patient zero, each judged on a small example, then in that engine.

``setting.engine(cures)`` runs patient zero with these cures besides those found so far, on the notebook's ranks.
"""

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch

from course.exercises.experts import judge_parts
from course.exercises.generating import ENDS, Toy, judge_calls
from course.exercises.heads import LAYOUTS
from course.exercises.mask import judge_masked, shaped
from course.exercises.rope_call import fails_aloud, pair
from course.exercises.rotation import halves, misturned
from course.judge import patient
from course.judge.attempt import Attempt, NotYet, Uncopied, saying, several, tensor, whole_numbers
from course.judge.compare import agree
from course.judge.cuts import judge_part
from course.judge.limit import works
from course.judge.verdict import Setting, exercise
from course.judge.words import in_words
from tplab.checks import counted, quoted
from tplab.errors import TplabError
from tplab.shard import split_evenly


@exercise("apply_causal_mask", "09", takes="scores", right=patient.apply_causal_mask,
          agreed="no NaN, and no key of the future")
def apply_causal_mask(attempt: Attempt, setting: Setting):
    """Scores of 6 tokens, of one in bfloat16, and of many. The engine gives the check's report."""
    for batch, tokens, dtype in ((2, 6, torch.float32), (2, 1, torch.bfloat16), (1, 130, torch.float32)):
        scores = torch.arange(4.0 * batch * tokens * tokens).sin().view(batch, 4, tokens, tokens).to(dtype)
        judge_masked(attempt.tensor(scores, **shaped(scores)), scores,
                     torch.ones(batch, 1, tokens, tokens, dtype=torch.bool).triu(1))
    return _cures(setting, "attention.apply_causal_mask", attempt, "the check has no quarrel with attention any more",
                  lambda report: [one.sentence for one in report.diagnoses if one.point.endswith(".attn")])


@exercise("shard_weight", "09", takes="loaded, start, size, hidden_size",
          right=patient.shard_weight, spare="hidden_size",
          agreed="the rows of the rank's heads, and of a bias the same numbers")
def shard_weight(attempt: Attempt, setting: Setting):
    """Weights that are no squares, one that is, and a bias, in bfloat16."""
    for shape, start, size in (((20, 6), 4, 8), ((6, 20), 2, 3), ((20,), 12, 4), ((12, 12), 6, 6)):
        loaded = torch.arange(float(torch.Size(shape).numel())).sqrt().view(shape)
        loaded = loaded if len(shape) > 1 else loaded.bfloat16()
        with saying(f"{'a weight' if len(shape) > 1 else 'a bias'} {list(shape)}, {size} from {start} on: "):
            judge_part(attempt(loaded, start, size, shape[-1]), loaded, range(start, start + size), "", ways={
                "it is read as if it were [in, out], cut there along dim 1, and turned. The checkpoint has [out, in]":
                    loaded.reshape(shape[::-1])[:, start:start + size].T} if len(shape) > 1 else {})


@exercise("extend_cache", "09", takes="kv_cache, k, v, num_repeats", right=patient.extend_cache,
          agreed="the cache holds KV heads, and attention gets one for each query head")
def extend_cache(attempt: Attempt, setting: Setting):
    """Three steps of two sequences with two KV heads, repeated three times, once, or unequally. The engine: as for
    generate."""
    for repeats in (3, 1, torch.tensor([1, 2])):
        cache, whole = None, [torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
        for start, stop in ((0, 3), (3, 4), (4, 6)):
            args = cache, *(one[:, :, start:stop] for one in whole), repeats
            found, right = attempt(*args), patient.extend_cache(*args)
            with saying(f"{start} tokens in the cache, {stop - start} new, num_repeats {quoted(repeats)}: "):
                *given, pair = several(found, "k, v for attention and the pair (k, v) of the cache", 3)
                values = [*several(pair, "as the third the cache's pair (k, v)"), *given]
                rights = [*right[2], *right[:2]]
                names = "the cache's k", "the cache's v", "k for attention", "v for attention"
                for what, value, must in zip(names, values, rights):
                    if must is rights[0] and getattr(value, "shape", None) == rights[2].shape != must.shape:
                        raise NotYet(f"{what} has {value.shape[1]} heads, and 2 are projected: what is repeated for "
                                     "attention is not stored")
                    with saying(f"{what}: "):
                        tensor(value, "batch, heads, tokens, head_size", must.shape, must.dtype)
                        agree(value, must, {}, dims="sequence, head, token")
            cache = right[2]
    return _cures(setting, "attention.extend_cache", attempt, "the text is Hugging Face's, with the cache read",
                  _tokens)


@exercise("share", "09", takes="total", right=patient.share,
          agreed="everything is dealt out, in order, and no rank has two more than another")
def share(attempt: Attempt, setting: Setting):
    """What divides and what does not. The engine gives the check's report, on ranks that do not divide the heads."""
    for total, ranks in ((8, 2), (9, 2), (8, 3), (14, 4), (7, 1), (2, 3)):
        parts = [_on(number, ranks, attempt, total) for number in range(ranks)]
        with saying(f"{total} over {counted(ranks, 'rank')}: "):
            parts = [whole_numbers(several(part, "a pair, the first and how many,"), "the first and how many")
                     for part in parts]
            with saying(", ".join(f"rank {number} begins at {first} and has {count}"
                                  for number, (first, count) in enumerate(parts)) + ": "):
                judge_parts([range(first, first + count) for first, count in parts], total, "head")
    return _cures(setting, "linear.share", attempt, "on ranks that do not divide them, every query head has its rank",
                  lambda report: [one.sentence for one in report.diagnoses if one.sentence.startswith("Query heads")])


def _on(number: int, ranks: int, call, *args):
    """``call(*args)`` as on that rank of patient zero's."""
    from patient_zero import linear

    with mock.patch.multiple(linear, tp_rank=lambda: number, tp_size=lambda: ranks):
        return call(*args)


@exercise("apply_rope", "09", takes="rotary_emb, position_ids, q, k", right=patient.apply_rope,
          agreed="every head is turned by its token's position")
def apply_rope(attempt: Attempt, setting: Setting):
    """Two rows at other positions, one padded on the left; 4 query and 2 KV heads, 6 tokens, then as many as there are
    heads; the engine as above."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2RotaryEmbedding

    def is_asked(_, given):
        if len(given) > 1 and given[1].is_floating_point():
            raise NotYet("rotary_emb takes (x, position_ids), and as position_ids it is given numbers of "
                         f"{given[1].dtype}, {list(given[1].shape)}")

    tables = Qwen2RotaryEmbedding(Qwen2Config(hidden_size=32, num_attention_heads=4, num_hidden_layers=1))
    tables.register_forward_pre_hook(is_asked)
    for tokens in (6, 4):
        q = torch.arange(64.0 * tokens).sin().view(2, 4, tokens, 8)
        k = torch.arange(32.0 * tokens).cos().view(2, 2, tokens, 8)
        positions = torch.stack([torch.arange(5, 5 + tokens), (torch.arange(tokens) - 2).clamp(min=0)])
        if tokens == 6:
            fails_aloud(lambda failing, given=(positions, q, k): attempt(failing, *given), "rotary_emb",
                        "rotary_emb, which gives cos and sin, is never asked")
        found = pair(attempt(tables, positions, q, k), q, k)
        cos, sin = (table[:, None] for table in tables(q, positions))
        every_cos, every_sin = (table[0] for table in tables(q, torch.arange(32)[None]))
        for name, ours, x in zip("qk", found, (q, k)):
            with saying(f"{name}, {tokens} tokens and {x.shape[1]} heads: "):
                tensor(ours, "batch, heads, tokens, head_size", x.shape, x.dtype)
                over_heads = x * cos.transpose(1, 2) + halves(x) * sin.transpose(1, 2) if tokens == x.shape[1] else ()
                # As at which position each token is turned, of [sequence, head, token, position, number].
                there = x[..., None, :] * every_cos + halves(x)[..., None, :] * every_sin
                same = (there - ours[..., None, :]).abs().amax((1, 4)) < 1e-4
                turns = same.int().argmax(-1).tolist() if same.any(-1).all() else None
                agree(ours, x * cos + halves(x) * sin, misturned(x, cos, sin) | {
                    "the table lies over the heads, which fits here as there are as many tokens: which axis do cos and "
                    "sin lie on?": over_heads}, f"it is turned as at positions {turns}; position_ids are "
                    f"{positions.tolist()}" if turns else "it is not turned by Hugging Face's angles",
                    dims="sequence, head, token" * (not turns), made=attempt.made[0], steps={} if turns else {
                        "the cosines": cos, "the sines": sin, f"{name} times cosine": x * cos,
                        "the other half": halves(x), "the other half times sine": halves(x) * sin})
    return _cures(setting, "attention.apply_rope", attempt, "no layer leaves Hugging Face any more", lambda report: (
        first := report.first_divergence) and first.name.startswith("layers.") and [_sentence(report)])


class _Model(Uncopied):
    """The toy of notebook 06, called like patient zero's model: its cache is a tensor of as many tokens."""

    config = SimpleNamespace(eos_token_id=ENDS[0])

    def begin(self, draws) -> None:
        """A new text."""
        self.toy, self.held = Toy(draws), 0

    def __call__(self, input_ids, position_ids=None, kv_caches=None):
        if input_ids.dim() != 2 or len(input_ids) != 1:
            raise ValueError(f"input_ids must be [1, tokens], not {list(input_ids.shape)}")
        count, held = input_ids.shape[1], kv_caches[0][0].shape[2] if kv_caches else 0
        positions = torch.arange(count) if position_ids is None else torch.as_tensor(position_ids).reshape(-1)
        if held != self.held:
            raise NotYet(f"call {len(self.toy.calls) + 1} is given " + (
                f"a cache of {held} tokens, and " + ("a new text begins with None" if not self.held else
                f"by then it holds {self.held}: what the call before returned must be kept")
                if held else "no cache: what the call before returned must be kept"))
        self.held += count
        token, keys = self.toy(input_ids[0], positions), torch.zeros(1, 1, self.held, 1)
        rows = torch.arange(token + 1 - count, token + 1) % 50  # the last one is the token's
        return torch.nn.functional.one_hot(rows, 50)[None].float(), [(keys, keys)]

    forward = __call__


@exercise("generate", "09", takes="self, input_ids, max_new_tokens", right=patient.generate,
          agreed="the prompt in one call, then every token computed once")
def generate(attempt: Attempt, setting: Setting):
    """Prompts of five tokens and of one, and nothing new, by one model. The engine gives the new ids that it writes,
    and those of Hugging Face; it gets a right cache along with the function, for its own has a bug that shows once it
    is read."""
    model = _Model()
    for prompt, count, draws in (([3, 1, 4, 1, 5], 4, ()), ([9], 30, ()), ([24], 8, ENDS), ([5, 2], 0, ())):
        model.begin(draws)
        with saying(f"prompt of {len(prompt)}, {count} new: "):
            judge_calls(model.toy, attempt(model, prompt, count), prompt, count, "the most likely token for it")
    return _cures(setting, "model.TensorParallelModel.generate", attempt, "the text is Hugging Face's", _tokens,
                  {"attention.extend_cache": patient.extend_cache})


@exercise("kv_share", "09", takes="num_heads, num_kv_heads", right=patient.kv_share,
          agreed="every query head reads its own KV head")
def kv_share(attempt: Attempt, setting: Setting):
    """The layouts of notebook 02. The engine gives the check's report, on ranks that do not divide the heads."""
    from patient_zero import linear

    for num_heads, num_kv_heads, ranks in LAYOUTS:
        for number in range(ranks):
            share = split_evenly(num_heads, ranks)[number]
            with mock.patch.object(linear, "share", patient.share):
                found = _on(number, ranks, attempt, num_heads, num_kv_heads)
            with saying(f"{num_heads} query and {num_kv_heads} KV heads, rank {number} of {ranks}: "):
                _examine_heads(found, share, num_heads // num_kv_heads)
    return _cures(setting, "linear.kv_share", attempt, "the engine is clean on ranks that do not divide the heads",
                  lambda report: report.verdict != "clean" and [_sentence(report)])


def _examine_heads(found, share: range, group: int) -> None:
    *numbers, repeats = several(found, "the first KV head, how many, and how often each is repeated", 3)
    first, count = whole_numbers([one.item() if isinstance(one, torch.Tensor) and one.numel() == 1 else one
                                  for one in numbers], "the first KV head and how many")
    wanted, heads = [head // group for head in share], f"query heads {share[0]}–{share[-1]}"
    try:
        held = torch.arange(first, first + count).repeat_interleave(repeats).tolist()
    except (TypeError, ValueError, RuntimeError):
        raise NotYet(f"repeat_interleave does not take {quoted(repeats)} for {count} heads; repeats is a number or a "
                     f"tensor of {count}") from None
    if held != wanted:
        raise NotYet(f"({first}, {count}, {quoted(repeats)}) repeats KV heads to {held}; {heads} read {wanted}")
    if count != len(set(wanted)):
        raise NotYet(f"{heads} read {len(set(wanted))} KV heads, and it holds {count}")


@works
def _cures(setting: Setting, name: str, attempt: Attempt, fine: str, wrong: Callable, more=()) -> str | None:
    """The remark ``fine``, unless something is ``wrong(what the engine gives)`` with this cure in it."""
    if setting.engine is None:
        return None
    try:
        found = wrong(setting.engine({name: attempt.function, **dict(more)}))
    except TplabError as error:
        raise NotYet(in_words(error)) from error
    if found:
        raise NotYet(f"in the engine, {found[0]}")
    return fine


def _tokens(texts) -> list[str]:
    found, right = list(texts[0]), texts[1]
    agree = next((i for i, pair in enumerate(zip(found, right)) if pair[0] != pair[1]), len(right))
    return [] if found == right else [f"{agree} of {len(right)} tokens are Hugging Face's"]


def _sentence(report) -> str:
    return next(iter([*(one.sentence for one in report.diagnoses), *report.recording.contradictions,
                      *report.open_questions]))
