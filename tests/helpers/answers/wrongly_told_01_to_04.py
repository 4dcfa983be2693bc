"""Answers to 01 to 04 that keep something between calls, do as much on one rank only or let ranks meet in vain, and
others that were accepted, or told what is not so."""

from helpers.answers import Wrong
from helpers.answers.nb09 import but
from helpers.notebooks import solutions

from course import lesson

_SOLVED = solutions(lesson.all_exercises())
_KEEPS = "alled again, it returns something else than a first call with the same arguments"
_TURN = ("def my_rope(x, positions, theta):\n    half, out = x.shape[-1] // 2, x.clone()\n"
         "    angles = positions[:, None, None].float() * theta ** (-torch.arange(half) / half)\n"
         "    cos, sin = angles.cos(), angles.sin()\n"
         "    out[..., :half] = out[..., :half] * cos - out[..., half:] * sin\n    out[..., half:] = {}\n"
         "    return out")
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
        _asserts("if lost: name = f'NaN in {name}: {lost:.0%}'", "Which line is to raise, and what is it given"),
        _asserts("try:\n        assert lost == 0, f'NaN in {name}'\n    except AssertionError as error: return",
                 "Which line is to raise, and what is it given"),
        _asserts("assert lost or not lost, f'NaN in {name}'", "Which line is to raise, and what is it given")],
    "my_linears": [
        _changed("my_linears", "up[first:end].T @", "up[rank()::world_size()].T @",
                 "Right in yours: rank 0's inner features 0, 2, 4, 6 (line 5); not found: their product with the same"),
        _changed("my_linears", "    summand =", "    x = x[:, first:end]\n    summand =",
                 "it was called with x [5, 6], up [8, 6], down [6, 8], bias [6]"),
        _changed("my_linears", "x @ up[first:end].T", "all_reduce(x @ up[first:end].T)",
                 "calls all_reduce [5, 4] float32: the inner features of the ranks are other ones"),
        _changed("my_linears", "all_reduce(summand) + bias", "all_reduce(summand + bias // world_size())",
                 "See what follows in line 5 or after it"),
        Wrong("def my_linears(x, up, down, bias):\n    up, down = (one.chunk(world_size(), dim)[rank()] for dim, one in"
              " enumerate((up, down)))\n    return all_reduce(x @ up.T @ down.T) + bias",
              "on rank 2: IndexError: tuple index out of range")],
    "my_heads": [
        _changed("my_heads", "range(first, end)", "range(first, end - 1)",
                 "query heads [3, 7] on no rank: rank 0 has 0–2, rank 1 has 4–6")],
    "my_column_shard": [
        Wrong("def my_column_shard(source, rows):\n    if len(source.shape) == 1:\n        return source[rows.start:"
              "rows.stop]\n    return source[:].reshape(*source.shape[::-1])[:, rows.start:rows.stop].T",
              "row 0 of yours has numbers of rows 0–11, where rows 0–2 are its own")],
    "my_merged": [
        _changed("my_merged", "return torch.cat(pieces)",
                 "out = torch.zeros(sum(map(len, ranges)), *sources[0].shape[1:])\n    for one in pieces:\n"
                 "        out[:len(one)] = one\n    return out",
                 "[v 0–1|q 2–7] come back, and rows 8–11 of yours hold zeros"),
        _changed("my_merged", "zip(sources, ranges)", "zip(sources, (*ranges[:2], ranges[1]))",
                 "[a 1–6|b 1–4|c 1–4] come back where [a 1–6|b 1–4|c 1–5] are its own"),
        _changed("my_merged", "torch.cat(pieces)", "torch.cat(pieces) if pieces[0].dim() > 1 else pieces[0]",
                 "On weights over 2 ranks it is right"),
        Wrong("def my_merged(sources, ranges):\n    whole, at, rows = torch.cat([s[:] for s in sources]), 0, []\n"
              "    for r in ranges:\n        rows, at = [*rows, *(at + i for i in r)], at + len(r)\n"
              "    return whole[rows]", "k begins at row 16 and v begins at row 20; a rank has a piece of each"),
        Wrong("def my_merged(sources, ranges):\n    while sources: ranges = ranges[:]", "What ends it?")],
    "my_rotate_half": [
        Wrong("def my_rotate_half(x):\n    half = x.shape[2] // 2\n"
              "    return torch.cat([-x[:, :, half:], x[:, :, :half]], 2)",
              "x is [2, 4, 2, 10], and dimension 2 is cut in two; dimension 3 holds the numbers of a head"),
        _changed("my_rotate_half", "return torch", "return x + torch", "it makes [-15 -21 -27 17 29 45]")],
    "my_rope": [
        _changed("my_rope", "def my_rope(x, positions, theta):", "kept = {}\ndef my_rope(x, positions, theta):\n"
                 "    positions = kept.setdefault(len(x), positions)", _KEEPS),
        _changed("my_rope", "def my_rope(x, positions, theta):", "kept = {}\ndef my_rope(x, positions, theta):\n"
                 "    theta = kept.setdefault(x.shape[-1], theta)", _KEEPS),
        _changed("my_rope", "positions[:, None].float()", "(positions[0] + torch.arange(len(x)))[:, None].float()",
                 "x [5, 3, 6], positions [7, 2, 0, 11, 3], theta 500: the token at position 0"),
        Wrong(_TURN.format("out[..., half:] * cos + out[..., :half] * sin"),
              "numbers 3–5 of 6: the first, token 0, head 0, number 3"),
        Wrong("def my_rope(x, positions, theta):\n    speeds, out = theta ** (-torch.arange(0, x.shape[-1], 2) / "
              "x.shape[-1]), []\n    for t, p in zip(x, positions):\n        angle = (p * speeds).repeat(2)\n"
              "        a, b = t.chunk(2, -1)\n        out.append(t * angle.cos() + torch.cat([-b, a]).reshape(t.shape)"
              " * angle.sin())\n    return torch.stack(out).to(x.dtype)",
              "the angles (line 4), their cosines (line 6), their sines (line 6)")],
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
    "MyCache": [
        _changed("MyCache", "return self.k[layer], self.v[layer]", "self.k[layer], self.v[layer] = self.k[layer]["
                 "-16:].clone(), self.v[layer][-16:].clone()\n        return self.k[layer], self.v[layer]",
                 "after 2 tokens and 18 more, append to layer 0: for k comes [16, 3, 4]")],
    "my_mask": [
        _changed("my_mask", "def my_mask(positions, keys):", "first = {}\ndef my_mask(positions, keys):\n"
                 "    positions = first.setdefault((positions.shape, keys), positions)", _KEEPS)],
}
