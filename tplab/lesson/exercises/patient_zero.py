"""Notebook 09: seven functions of patient zero, each judged on a small example, then in that engine.

``setting.engine(cures)`` runs patient zero with these cures besides those found so far, on the notebook's ranks.
"""

from unittest import mock

import torch

from tplab.errors import TplabError
from tplab.lesson import patient
from tplab.lesson.exercises.mask import judge_masked, shaped
from tplab.lesson.limit import works
from tplab.lesson.mine import Mine, NotYet, agree, guarded, in_words, kind, tensor
from tplab.lesson.verdict import Setting, exercise
from tplab.shard import split_evenly


@exercise("apply_causal_mask", "09", takes="scores", right=patient.apply_causal_mask,
          agreed="no NaN, and no key of the future")
def apply_causal_mask(mine: Mine, setting: Setting):
    """Scores of 4 heads and 6 tokens, and of one token. The engine gives the check's report."""
    for tokens in (6, 1):
        scores = torch.arange(8.0 * tokens * tokens).sin().view(2, 4, tokens, tokens)
        judge_masked(mine.tensor(scores, **shaped(scores)), scores,
                     torch.ones(2, 1, tokens, tokens, dtype=torch.bool).triu(1))
    if setting.engine is not None:
        report = _in_engine(setting, "attention.apply_causal_mask", mine)
        if wrong := [one.sentence for one in report.diagnoses if one.point.endswith(".attn")]:
            raise NotYet(f"in the engine, {wrong[0]}")
        return "the check has no quarrel with attention any more"


@exercise("shard_weight", "09", takes="loaded, start, size, hidden_size", right=patient.shard_weight,
          agreed="the rows of the rank's heads, and of a bias the same numbers")
def shard_weight(mine: Mine, setting: Setting):
    """Weights that are no squares, and a bias."""
    for shape, start, size in (((20, 6), 4, 8), ((6, 20), 2, 3), ((20,), 12, 4), ((12, 12), 6, 6)):
        loaded = torch.arange(float(torch.Size(shape).numel())).view(shape)
        head = f"{'a weight' if len(shape) > 1 else 'a bias'} {list(shape)}, {size} from {start} on: "
        try:
            found = mine.tensor(loaded, start, size, shape[-1], dims="out here, in" if len(shape) > 1 else "out here",
                                shape=(size, *shape[1:]), dtype=loaded.dtype)
        except NotYet as wrong:
            raise NotYet(head + str(wrong)) from None
        turned, read = loaded.t()[start:start + size], loaded.reshape(shape[-1], -1)
        agree(found, loaded[start:start + size], {
            f"{head}these are columns, turned: the checkpoint has [out, in], and outputs are rows": turned,
            f"{head}it is read as if it were [in, out], cut there along dim 1, and turned. The checkpoint has [out, "
            f"in]":
                read[:, start:start + size].T,
            f"{head}these are the first rows there are": loaded[:size]}, f"{head}other rows come back")


@exercise("extend_cache", "09", takes="kv_cache, k, v, num_repeats", right=patient.extend_cache,
          agreed="the cache holds KV heads, and attention gets one for each query head")
def extend_cache(mine: Mine, setting: Setting):
    """Three steps of one layer with two KV heads, repeated three times, or unequally. The engine: as for generate."""
    for repeats in (3, torch.tensor([1, 2])):
        cache, whole = None, [torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
        for start, stop in ((0, 3), (3, 4), (4, 6)):
            found = mine(cache, *(one[:, :, start:stop] for one in whole), repeats)
            head = f"{start} tokens in the cache, {stop - start} new: "
            if not isinstance(found, tuple | list) or len(found) != 3 or not isinstance(
                    found[2], tuple | list) or len(found[2]) != 2:
                raise NotYet(f"{head}it returns {kind(found)}; k, v for attention and the pair (k, v) of the cache "
                             f"must "
                             "come back")
            for name, given, kept, one in zip("kv", found, found[2], whole):
                stored = one[:, :, :stop]
                if isinstance(kept, torch.Tensor) and kept.shape[1] > 2:
                    raise NotYet(f"{head}the cache holds {kept.shape[1]} heads of {name}, and 2 are projected: what is "
                                 "repeated for attention is not stored")
                for what, value, right in ((f"the cache's {name}", kept, stored),
                                           (f"{name} for attention", given, stored.repeat_interleave(repeats, 1))):
                    try:
                        tensor(value, "batch, heads, tokens, head_size", right.shape, right.dtype)
                    except NotYet as wrong:
                        raise NotYet(f"{head}{what}: {wrong}") from None
                    copies = stored.repeat(1, 3, 1, 1) if isinstance(repeats, int) else right
                    agree(value, right, {f"{head}{what}: neighbouring query heads share a KV head, so its copies lie "
                                         "side by side": copies, f"{head}{what}: the new tokens stand in front":
                                         torch.cat([right[:, :, start:], right[:, :, :start]], 2)},
                          f"{head}{what} is not what was given")
            cache = patient.extend_cache(cache, *(one[:, :, start:stop] for one in whole), repeats)[2]
    if setting.engine is not None:
        found, right = _in_engine(setting, "attention.extend_cache", mine)
        if list(found) != right:
            raise NotYet("in the engine, with its cache read, the text is not Hugging Face's")
        return "the text is Hugging Face's, with the cache read"


@exercise("share", "09", takes="total", right=patient.share,
          agreed="everything is dealt out, in order, and no rank has two more than another")
def share(mine: Mine, setting: Setting):
    """What divides and what does not. The engine gives the check's report, on ranks that do not divide the heads."""
    for total, ranks in ((8, 2), (9, 2), (8, 3), (14, 4), (7, 1), (2, 3)):
        parts = [_on(number, ranks, mine, total) for number in range(ranks)]
        have = f"{total} over {ranks} rank{'s' * (ranks > 1)}: "
        for number, part in enumerate(parts):
            if not isinstance(part, tuple | list) or len(part) != 2 or not all(map(_whole, part)):
                raise NotYet(f"{have}rank {number} gets {kind(part)}; a pair must come back, the first and how many")
        said = have + ", ".join(f"rank {number} begins at {first} and has {count}"
                                for number, (first, count) in enumerate(parts))
        counts = [int(count) for _, count in parts]
        if sum(counts) != total:
            raise NotYet(f"{said}: that is {sum(counts)} together. Who takes what the division leaves over?")
        if [int(first) for first, _ in parts] != [sum(counts[:number]) for number in range(ranks)]:
            raise NotYet(f"{said}: where does a rank begin, if those before it have one more?")
        if max(counts) - min(counts) > 1:
            raise NotYet(f"{said}: everybody waits for the largest share. Can it be dealt out more evenly?")
    if setting.engine is not None:
        report = _in_engine(setting, "linear.share", mine)
        if wrong := [one.sentence for one in report.diagnoses if one.sentence.startswith("Query heads")]:
            raise NotYet(f"in the engine, {wrong[0]}")
        return "on ranks that do not divide them, every query head has its rank"


def _whole(value) -> bool:
    return isinstance(value, int) or isinstance(value, torch.Tensor) and value.numel() == 1


def _on(number: int, ranks: int, call, *args):
    """``call(*args)`` as on that rank of patient zero's."""
    from patient_zero import linear

    with mock.patch.multiple(linear, tp_rank=lambda: number, tp_size=lambda: ranks):
        return call(*args)


@exercise("apply_rope", "09", takes="rotary_emb, position_ids, q, k", right=patient.apply_rope,
          agreed="every head is turned by its token's position")
def apply_rope(mine: Mine, setting: Setting):
    """Two rows at other positions; 4 query and 2 KV heads, first with 6 tokens, then with as many as there are heads.

    The engine gives the check's report.
    """
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2RotaryEmbedding

    tables = Qwen2RotaryEmbedding(Qwen2Config(hidden_size=32, num_attention_heads=4, num_hidden_layers=1))
    for tokens in (6, 4):
        q = torch.arange(64.0 * tokens).sin().view(2, 4, tokens, 8)
        k = torch.arange(32.0 * tokens).cos().view(2, 2, tokens, 8)
        positions = torch.stack([torch.arange(5, 5 + tokens), torch.arange(2, 2 + tokens)])
        if tokens == 6:
            _swallows(mine, q, k, positions)
        found = mine(tables, positions, q, k)
        if not isinstance(found, tuple | list) or [isinstance(x, torch.Tensor) for x in found] != [True] * 2:
            raise NotYet(f"it returns {kind(found)}; q and k must come back, in this order")
        restarted = patient.apply_rope(tables, torch.arange(tokens).repeat(2, 1), q, k)
        for name, ours, truth, counted, before in zip("qk", found, patient.apply_rope(tables, positions, q, k),
                                                      restarted, (q, k)):
            _turned(name, ours, truth, counted, before, positions)
    if setting.engine is not None:
        report = _in_engine(setting, "attention.apply_rope", mine)
        if (first := report.first_divergence) and first.name.startswith("layers."):
            raise NotYet(f"in the engine, {_sentence(report)}")
        return "no layer leaves Hugging Face any more"


def _turned(name: str, ours, truth, restarted, before, positions) -> None:
    if ours.shape != before.shape:
        raise NotYet(f"{name} goes in as {list(before.shape)} and comes back as {list(ours.shape)}; attention expects "
                     "heads before tokens, as before")
    if ours.equal(before):
        raise NotYet(f"{name} comes back as it went in: nothing was turned")
    if torch.allclose(ours, restarted, atol=1e-5):
        raise NotYet(f"{name} is turned as if positions began at 0; position_ids say {positions[0, 0]} to "
                     f"{positions[0, -1]}")
    if torch.allclose(ours[0], truth[0], atol=1e-5) and not torch.allclose(ours, truth, atol=1e-5):
        raise NotYet(f"{name} of the second row of the batch is turned by the positions of the first")
    if not torch.allclose(ours.norm(dim=-1), before.norm(dim=-1), atol=1e-4):
        raise NotYet(f"{name} changes its lengths, so it was not turned: which axis of {name} do cos and sin lie on?")
    if not torch.allclose(ours, truth, atol=1e-5):
        heads = " (here there are as many tokens as heads, so that a table laid over the heads fits too)"
        raise NotYet(f"{name} is turned, but not by Hugging Face's angles: which function do cos and sin belong to, "
                     f"and which axis do they lie on?{heads * (before.shape[1] == before.shape[2])}")


def _swallows(mine: Mine, q, k, positions) -> None:
    def broken_tables(x, position_ids):
        asked.append(position_ids)
        raise ArithmeticError("no tables")

    asked = []
    try:
        guarded(mine.function, broken_tables, positions.clone(), q.clone(), k.clone())
    except NotYet as wrong:
        if isinstance(wrong.__cause__, ArithmeticError):
            return
        raise
    raise NotYet("the tables raised an exception and nobody heard of it: a rotation that fails must stop the engine"
                 if asked else "rotary_emb, which gives cos and sin, is never asked")


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


@exercise("generate", "09", takes="self, input_ids, max_new_tokens", right=patient.generate,
          agreed="the prompt in one call, then every token computed once")
def generate(mine: Mine, setting: Setting):
    """Prompts of five tokens and of one. The engine gives the new ids that it writes, and those of Hugging Face.

    It gets a right cache along with the function, for its own has a bug that shows as soon as it is read.
    """
    for prompt, count in (([3, 1, 4, 1, 5], 4), ([9], 3)):
        toy = _ToyModel()
        found = guarded(mine.function, toy, list(prompt), count)
        if not isinstance(found, list) or not all(type(token) is int for token in found):
            raise NotYet(f"it returns {kind(found)}; a list of whole numbers must come back, the new ids")
        _examine_calls(toy.calls, len(prompt), count)
        if len(found) != count:
            among = ", the prompt among them" * (found[:len(prompt)] == prompt)
            raise NotYet(f"{count} new tokens were asked for, {len(found)} came back{among}")
        if found != (right := patient.generate(_ToyModel(), prompt, count)):
            raise NotYet(f"calls and positions are right, but {found} came back instead of {right}: the argmax of "
                         "which row is the next token?")
    if setting.engine is not None:
        found, right = _in_engine(setting, "model.TensorParallelModel.generate", mine,
                                  {"attention.extend_cache": patient.extend_cache})
        if list(found) != right:
            agree = next((i for i, pair in enumerate(zip(found, right)) if pair[0] != pair[1]), len(right))
            raise NotYet(f"in the engine, {agree} of {len(right)} tokens are Hugging Face's")
        return "the text is Hugging Face's"


def _examine_calls(calls: list, length: int, new: int) -> None:
    for number, (count, positions, held) in enumerate(calls):
        have = f"call {number + 1} for a prompt of {length} token{'s' * (length > 1)}"
        if number == 0 and count != length:
            raise NotYet(f"{have} computes {count} tokens; the whole prompt comes first, in one call")
        if number and not held:
            raise NotYet(f"{have} is given no cache: who keeps what the call before returned?")
        if number and count > 1:
            raise NotYet(f"{have} computes {count} tokens, though {held} are in the cache: only the newest one is new")
        if held != (length - 1 + number if number else 0):
            raise NotYet(f"{have} is given a cache of {held} tokens; after call {number} it holds "
                         f"{length - 1 + number}")
        if positions[0] != held:
            raise NotYet(f"{have} says position {positions[0]}; {held} tokens come before, so it is {held} (without "
                         "position_ids the model counts from 0)")
    if len(calls) > new:
        raise NotYet(f"{len(calls)} calls for {new} new token{'s' * (new > 1)}: each call draws one, the prompt's too. "
                     "Who reads what comes after the last one?")


_LAYOUTS = [(8, 2, 2), (8, 2, 4), (8, 2, 3), (9, 3, 2), (14, 2, 4), (6, 6, 4), (7, 1, 3)]


@exercise("kv_share", "09", takes="num_heads, num_kv_heads", right=patient.kv_share,
          agreed="every query head reads its own KV head")
def kv_share(mine: Mine, setting: Setting):
    """Seven layouts of heads. The engine gives the check's report, on ranks that do not divide the heads."""
    from patient_zero import linear

    for num_heads, num_kv_heads, ranks in _LAYOUTS:
        for number in range(ranks):
            share = split_evenly(num_heads, ranks)[number]
            with mock.patch.object(linear, "share", lambda total, n=number, ranks=ranks: _even(total, n, ranks)):
                found = _on(number, ranks, mine, num_heads, num_kv_heads)
            _examine_heads(found, share, num_heads // num_kv_heads,
                           f"{num_heads} query and {num_kv_heads} KV heads, rank {number} of {ranks}: ")
    if setting.engine is not None:
        report = _in_engine(setting, "linear.kv_share", mine)
        if report.verdict != "clean":
            raise NotYet(f"in the engine, {_sentence(report)}")
        return "the engine is clean on ranks that do not divide the heads"


def _examine_heads(found, share: range, group: int, have: str) -> None:
    if not isinstance(found, tuple) or len(found) != 3:
        raise NotYet(f"it returns {kind(found)}; first KV head, how many, how often each is repeated")
    first, count, repeats = found
    try:
        held = torch.arange(int(first), int(first) + int(count)).repeat_interleave(repeats).tolist()
    except (TypeError, ValueError, RuntimeError):
        raise NotYet(f"{have}repeat_interleave does not take {found}; repeats is a number or a tensor of {count}"
                     ) from None
    wanted = [head // group for head in share]
    ours = f"query heads {share[0]}–{share[-1]}" if len(share) > 1 else f"query head {share[0]}"
    if len(held) != len(share):
        raise NotYet(f"{have}{ours} are {len(share)}, but {len(held)} repeated KV heads stand beside them")
    if held != wanted:
        at = next(i for i in range(len(held)) if held[i] != wanted[i])
        raise NotYet(f"{have}query head {share[at]} reads KV head {held[at]}, and its own is {wanted[at]}")
    if int(count) != len(set(wanted)):
        raise NotYet(f"{have}{ours} read {len(set(wanted))} KV heads, and it holds {int(count)}")


def _even(total: int, number: int, ranks: int) -> tuple[int, int]:
    part = split_evenly(total, ranks)[number]
    return part.start, len(part)


@works
def _in_engine(setting: Setting, name: str, mine: Mine, more=()):
    try:
        return setting.engine({name: mine.function, **dict(more)})
    except TplabError as error:
        raise NotYet(in_words(error)) from error


def _sentence(report) -> str:
    """What the check found first."""
    return next(iter([*(one.sentence for one in report.diagnoses), *report.recording.contradictions,
                      *report.open_questions]))
