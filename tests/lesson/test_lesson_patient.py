"""The exercises of notebook 09: right answers of other shapes pass, wrong ones are refused by name, in one line."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb, rotate_half

from tplab import lesson
from tplab.lab.batch import FOLDER
from tplab.lesson import patient

sys.path.insert(0, str(FOLDER))

from patient_zero import attention, linear  # noqa: E402


def rope_tokens_first(rotary_emb, position_ids, q, k):
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rotary_emb(q, position_ids), unsqueeze_dim=2)
    return q.transpose(1, 2), k.transpose(1, 2)


def rope_by_hand(rotary_emb, position_ids, q, k):
    cos, sin = (table[:, None] for table in rotary_emb(q, position_ids))
    return [x * cos + rotate_half(x) * sin for x in (q, k)]


def rope_query_only(rotary_emb, position_ids, q, k):
    return apply_rotary_pos_emb(q, k, *rotary_emb(q, position_ids))[0], k


def rope_from_zero(rotary_emb, position_ids, q, k):
    return apply_rotary_pos_emb(q, k, *rotary_emb(q, torch.arange(q.shape[2])[None]))


def rope_not_turned_back(rotary_emb, position_ids, q, k):
    return apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rotary_emb(q, position_ids), unsqueeze_dim=2)


def rope_over_the_heads(rotary_emb, position_ids, q, k):
    return apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rotary_emb(q, position_ids))


def rope_exchanged(rotary_emb, position_ids, q, k):
    cos, sin = rotary_emb(q, position_ids)
    return apply_rotary_pos_emb(q, k, sin, cos)


def rope_pairs(rotary_emb, position_ids, q, k):
    cos, sin = (table[:, None] for table in rotary_emb(q, position_ids))
    cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) for table in (cos, sin))
    return tuple(x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin for x in (q, k))


def rope_no_sine(rotary_emb, position_ids, q, k):
    cos, sin = rotary_emb(q, position_ids)
    return apply_rotary_pos_emb(q, k, cos, sin * 0)


@pytest.mark.parametrize("answer", [patient.apply_rope, rope_tokens_first, rope_by_hand])
def test_right_rotations(answer):
    assert patient.rope_problem(answer) == ""


@pytest.mark.parametrize("answer, words", [
    (attention.apply_rope, "nobody heard of it"),
    (lambda rotary_emb, position_ids, q, k: (q, k), "is never asked"),
    (lambda rotary_emb, position_ids, q, k: rotary_emb(q, position_ids) and None, "returns nothing"),
    (lambda rotary_emb, position_ids, q, k: (rotary_emb(q, position_ids), (q, k))[1], "nothing was turned"),
    (rope_query_only, "k comes back as it went in"), (rope_from_zero, "began at 0"),
    (rope_not_turned_back, r"comes back as \[1, 6, 4, 8\]"), (rope_over_the_heads, "must match"),
    (rope_exchanged, "not by Hugging Face's angles"), (rope_pairs, "not by Hugging Face's angles"),
    (rope_no_sine, "changes its lengths")])
def test_wrong_rotations(answer, words, capsys):
    refused(lesson.check_rope, answer, words, capsys, patient.apply_rope)


def generate_counting(self, input_ids, max_new_tokens):
    """Positions from the cache's own length."""
    ids, caches, new = input_ids, None, []
    while len(new) < max_new_tokens:
        start = caches[0][0].shape[2] if caches else 0
        logits, caches = self(torch.tensor([ids]), torch.arange(start, start + len(ids))[None], caches)
        ids = [int(logits[0, -1].argmax())]
        new += ids
    return new


def decode(feed=lambda tokens, ids: tokens, position=lambda ids, step: len(ids) + step, caches=lambda new, old: new,
           row=-1, result=lambda new, ids: new, extra=0):
    """A `generate` that is right but for what is given."""
    def generate(self, input_ids, max_new_tokens):
        tokens, positions, held, new = torch.tensor([input_ids]), torch.arange(len(input_ids))[None], None, []
        for step in range(max_new_tokens + extra):
            logits, out = self(tokens, positions, held)
            held = caches(out, held)
            new.append(int(logits[0, row].argmax()))
            tokens = feed(torch.tensor([new[-1:]]), torch.tensor([input_ids + new]))
            start = position(input_ids, step)
            positions = None if start is None else torch.arange(start, start + tokens.shape[1])[None]
        return result(new, input_ids)

    return generate


@pytest.mark.parametrize("answer", [patient.generate, generate_counting, decode()])
def test_right_ways_to_generate(answer):
    assert patient.generate_problem(answer) == ""


@pytest.mark.parametrize("answer, words", [
    (decode(feed=lambda tokens, ids: ids, position=lambda ids, step: 0, caches=lambda new, old: None), "no cache"),
    (decode(caches=lambda new, old: None), "no cache"),
    (decode(feed=lambda tokens, ids: ids, position=lambda ids, step: 0), "call 2 .* computes 6 tokens"),
    (decode(position=lambda ids, step: None), "position 0; 5 tokens come before"),
    (decode(position=lambda ids, step: len(ids) + step + 1), "position 6; 5 tokens come before"),
    (decode(position=lambda ids, step: len(ids) + step - 1), "position 4; 5 tokens come before"),
    (decode(caches=lambda new, old: old or new), "call 3 .* cache of 5 tokens; after call 2 it holds 6"),
    (decode(result=lambda new, ids: ids + new), "the prompt among them"),
    (decode(extra=1), "5 came back"), (decode(row=0), "argmax of which row"),
    (decode(result=lambda new, ids: torch.tensor([new])), "it returns Tensor"),
    (decode(result=lambda new, ids: None), "it returns nothing")])
def test_wrong_ways_to_generate(answer, words, capsys):
    refused(lambda function, _: lesson.check_generate(function, None, []), answer, words, capsys, patient.generate)


def kv(first=lambda q, n, group: q[0] // group, count=None, repeats=None):
    def kv_share(num_heads, num_kv_heads):
        start, heads = linear.share(num_heads)
        q, group = range(start, start + heads), num_heads // num_kv_heads
        low = first(q, num_kv_heads, group)
        held = count(q, num_kv_heads, group) if count else q[-1] // group - low + 1
        each = repeats(q, held, group) if repeats else torch.tensor(
            [sum(head // group == low + i for head in q) for i in range(held)])
        return low, held, each

    return kv_share


@pytest.mark.parametrize("answer", [patient.kv_share, kv()])
def test_right_shares_of_kv_heads(answer):
    assert patient.kv_share_problem(answer) == ""


@pytest.mark.parametrize("answer, words", [
    (linear.kv_share, "8 query and 2 KV heads, rank 1 of 3: query head 3 reads KV head 1, and its own is 0"),
    (kv(first=lambda q, n, group: linear.tp_rank() % n, count=lambda q, n, group: 1,
        repeats=lambda q, held, group: len(q)), "rank 1 of 4: query head 2 reads KV head 1"),
    (kv(first=lambda q, n, group: 0), "rank 1 of 2: .* it holds 2"),
    (kv(repeats=lambda q, held, group: group), "repeated KV heads stand beside them"),
    (kv(repeats=lambda q, held, group: len(q) // held), "repeated KV heads stand beside them"),
    (kv(repeats=lambda q, held, group: [len(q)]), "repeat_interleave does not take"),
    (lambda num_heads, num_kv_heads: 1, "it returns int"),
    (lambda num_heads, num_kv_heads: None, "it returns nothing")])
def test_wrong_shares_of_kv_heads(answer, words, capsys):
    refused(lesson.check_kv_share, answer, words, capsys, patient.kv_share)


def refused(judge, answer, words, capsys, right):
    """The answer gets one line that says why, and the notebook goes on with the lab's own function."""
    assert judge(answer, None) is right
    line = capsys.readouterr().out
    assert line.startswith("NOT YET") and line.count("\n") == 1 and len(line) < 360
    assert re.search(words, line), line


def test_what_only_the_engine_shows_is_said_and_what_passes_is_kept(capsys):
    wrong = SimpleNamespace(name="layers.0.q_rope")
    sick = SimpleNamespace(first_divergence=wrong, verdict="bug", diagnoses=[SimpleNamespace(sentence="q is off")])
    well = SimpleNamespace(first_divergence=SimpleNamespace(name="logits"), verdict="clean")
    assert lesson.check_rope(rope_by_hand, lambda cures: well) is rope_by_hand
    assert lesson.check_kv_share(kv_right := kv(), lambda cures: well) is kv_right
    assert lesson.check_generate(generate_counting, lambda cures: [1, 2], [1, 2]) is generate_counting
    assert capsys.readouterr().out.count("PASS") == 3
    sick.recording, sick.open_questions = SimpleNamespace(contradictions=["heads on no rank"]), []
    lesson.check_rope(rope_by_hand, lambda cures: sick)
    sick.diagnoses = []
    lesson.check_kv_share(kv(), lambda cures: sick)
    lesson.check_generate(generate_counting, lambda cures: [1, 3, 2], [1, 2, 2])
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ", 1)[1] for line in said] == ["in the engine, q is off", "in the engine, heads on no rank",
                                                            "in the engine, 1 of 3 tokens are Hugging Face's"]


def test_cures_stand_for_one_call_only():
    seen = lesson.with_cures({"linear.share": lambda total: "cured"}, lambda total: linear.share(total), 8)
    assert seen == "cured" and linear.share(8) == (0, 8)
