"""Answers to 01 to 04 that keep something between calls, do as much on one rank only or let ranks meet in vain, and
others that were accepted, or told what is not so."""

from helpers.answers import Wrong
from helpers.answers.nb09 import but
from helpers.notebooks import solutions

from tplab import lesson

_SOLVED = solutions(lesson.all_exercises())
_KEEPS = "alled again, it returns something else than a first call with the same arguments"
_LOST = "    lost = tensor.isnan().double().mean().item()\n"


def _changed(name: str, old: str, new: str, words: str, sizes: tuple[int, ...] = (2,)) -> Wrong:
    return Wrong(but(_SOLVED[name], old, new), words, sizes)


def _asserts(body: str, words: str) -> Wrong:
    return Wrong(f"def my_assert_no_nan(tensor, name):\n{_LOST}    {body}", words, (2,))


ANSWERS = {
    "mask_scores": [
        Wrong("first = []\ndef mask_scores(scores, mask):\n    if not first or first[0].shape != mask.shape:\n"
              "        first[:] = [mask]\n    return scores.masked_fill(first[0], float('-inf'))", _KEEPS),
        Wrong("def mask_scores(scores, mask):\n    return scores.masked_fill(mask, float('-inf')) if rank() == 0 else "
              "scores", "in the engine, on rank 1 only: Attention fits a softmax over all keys", (2,)),
        Wrong("def mask_scores(scores, mask):\n    return all_reduce(scores.clone()).masked_fill(mask, float('-inf'))",
              "your line 2 calls all_reduce [2, 3, 4, 6] float32; no collective belongs here")],
    "my_additive_mask": [
        Wrong("first = {}\ndef my_additive_mask(tokens):\n"
              "    return first.setdefault(0, torch.full((tokens, tokens), float('-inf')).triu(1))", _KEEPS),
        Wrong("def my_additive_mask(tokens): return torch.ones(tokens, tokens).triu(1).log()",
              "it is the wrong way round: what may be seen is hidden, and the rest is not")],
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name):\n    assert not tensor[0].isnan().any(), f'NaN in {name}'",
              "in rows 1 to 3, and nothing is raised: it fires where row 0 is NaN"),
        _asserts("if lost: name = f'NaN in {name}: {lost:.0%}'", "None of your lines raises"),
        _asserts("try:\n        assert lost == 0, f'NaN in {name}'\n    except AssertionError as error: return",
                 "What does your except let out?"),
        _asserts("assert lost or not lost, f'NaN in {name}'", "What your assert is given is true even then")],
    "my_rope": [
        _changed("my_rope", "def my_rope(x, positions, theta):", "kept = {}\ndef my_rope(x, positions, theta):\n"
                 "    positions = kept.setdefault(len(x), positions)", _KEEPS),
        _changed("my_rope", "def my_rope(x, positions, theta):", "kept = {}\ndef my_rope(x, positions, theta):\n"
                 "    theta = kept.setdefault(x.shape[-1], theta)", _KEEPS)],
    "my_apply_rope": [
        _changed("my_apply_rope", "def my_apply_rope(self, q, k, cos, sin):",
                 "first = {}\ndef my_apply_rope(self, q, k, cos, sin):\n"
                 "    cos, sin = first.setdefault(cos.shape, (cos, sin))", _KEEPS),
        _changed("my_apply_rope", "    return q[0]",
                 "    if rank(): q = q.flip(2)\n    return q[0]", "in the engine, on rank 1 only: ")],
    "my_attend": [
        _changed("my_attend", "def my_attend(q, k, v, mask, scaling):",
                 "first = {}\ndef my_attend(q, k, v, mask, scaling):\n    mask = first.setdefault(mask.shape, mask)",
                 _KEEPS),
        _changed("my_attend", "return weights @ v", "return all_reduce(weights @ v)", "no collective belongs here")],
    "my_mask": [
        _changed("my_mask", "def my_mask(positions, keys):", "first = {}\ndef my_mask(positions, keys):\n"
                 "    positions = first.setdefault((positions.shape, keys), positions)", _KEEPS)],
    "my_token_positions": [
        Wrong("at = [0]\ndef my_token_positions(segment):\n    first = at[0] if segment.start else 0\n"
              "    at[0] = first + segment.count\n    return range(first, at[0])", _KEEPS, (2,)),
        Wrong("def my_token_positions(segment):\n    first = segment.start + rank()\n"
              "    return range(first, first + segment.count)", "in the engine, on rank 1 only: RoPE is right", (2,))],
}
