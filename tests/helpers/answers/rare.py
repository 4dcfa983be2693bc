"""Answers that are wrong, or unusual, in one corner: what only one of a check's cases shows, or only the engine."""

from helpers.answers import Right, Wrong
from helpers.answers.nb02 import _EVEN_Q, _LINEARS, _READ, _heads
from helpers.answers.nb03 import _BACK, _CALL, _EACH, apply_rope, half, positions, rope
from helpers.answers.nb04 import mask

_TWO = (2,)  # ranks, where other numbers of them bring nothing new
_PART = "y = x @ up[start:stop].T @ down[:, start:stop].T"


def fired(of: str) -> str:
    """An assert for NaN whose message says ``of`` it."""
    return ("def my_assert_no_nan(tensor, name):\n    lost = tensor.isnan()\n"
            f"    assert not lost.any(), f'NaN in {{name}} {{list(tensor.shape)}}: {of}'\n")


ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask & (scores > 0), -1e9)",
              "20 of 48 hidden keys can still")],
    "my_additive_mask": [
        Wrong("def my_additive_mask(n): return torch.full((n, n), float('-inf')).triu(1)[[*range(n - 2), -2, -1][:n]]"
              "\nright = my_additive_mask\ndef my_additive_mask(n): return right(n).masked_fill("
              "(torch.arange(n) > n - 3)[:, None], float('-inf'))",
              "the first, query 3, key 0, is hidden, and not hidden is right"),
        Right("def my_additive_mask(n): return torch.full((n, n), float('-inf'), dtype=torch.float64).triu(1)")],
    "my_assert_no_nan": [
        Wrong(fired("{100 * lost.double().mean() + 0.9:.1f} %"), "how much is lost? Here 30 % of the numbers are NaN"),
        Wrong(fired("{lost.double().mean() + 0.01:.3f}"), "how much is lost?"),
        Wrong("def my_assert_no_nan(tensor, name):\n"
              "    assert name == 'attention scores' or not tensor.isnan().any(), f'{tensor.isnan().sum()} of "
              "{list(tensor.shape)} {name}'", "in the engine, with the mask that multiplies, nothing fires", _TWO),
        Wrong("def my_assert_no_nan(tensor, name):\n"
              "    assert name != 'attention scores' and not tensor.isnan().any(), f'{tensor.isnan().sum()} of "
              "{list(tensor.shape)} {name}'", "AssertionError: 0 of [1, 4, 19, 19] attention scores", _TWO),
        Right(fired("{100 * lost.double().mean():.1f} %")), Right(fired(
              "a share of {lost.double().mean():.3f}")),
        Wrong("def my_assert_no_nan(tensor, name):\n    lost = tensor.isnan().sum()\n"
              "    assert not lost, f'NaN in {name}: {lost} of {tensor.numel()}, in {len(tensor)} rows'\n",
              "of what shape? [4, 5] is missing"),
        Wrong("def my_assert_no_nan(tensor, name): assert not tensor.isnan().any(), 'a NaN where none was meant: 8 of "
              "[4, 5]'", "which tensor? Its name, 'weights', is missing")],
    "my_linears": [
        Wrong(_LINEARS + f"    {_PART}\n    all_reduce(torch.zeros(1))\n    return all_reduce(y) + bias",
              "the op log holds 2 × all_reduce. One sum is enough, over the summands of [tokens, hidden]"),
        Wrong(_LINEARS + "    return all_reduce(x @ up[start:stop].T @ down[start:stop]) + bias",
              "it was called with x [5, 6], up [8, 6], down [6, 8]"),
        Wrong(_LINEARS + "    return all_reduce(x @ up[:stop - start].T @ down[:, :stop - start].T) + bias",
              "inner feature 0 to inner feature 3 count 2 t"),
        Right("""
def my_linears(x, up, down, bias):
    here = len(up) // world_size()
    start, stop = rank() * here, (rank() + 1) * here if rank() + 1 < world_size() else len(up)
    return all_reduce(x @ up[start:stop].T @ down[:, start:stop].T) + bias
"""),
        Wrong(_LINEARS + f"    {_PART}\n    return (all_reduce(y) + bias).double()", "on rank 0 it returns "
              "torch.float64")],
    "my_heads": [
        Wrong(_heads("range(r * H // T - 1, (r + 1) * H // T)", _READ), "holds query head -1, and they are 0 to 7"),
        Wrong(_heads(_EVEN_Q.replace("H", "min(H, 15)"), _READ),
              "32 query and 8 KV heads over 3 ranks: query heads [15–31] on no rank"),
        Right("""
def my_heads(num_heads, num_kv_heads, ranks):
    H, K, group = num_heads, num_kv_heads, num_heads // num_kv_heads
    ends = [-(-K * r // ranks) * group if K >= ranks else -(-H * r // ranks) for r in range(ranks + 1)]
    return tuple([range(a, b), range(a // group, (b - 1) // group + 1)] for a, b in zip(ends, ends[1:]))
"""),
        Right("import numpy as np\n" + _heads(f"[*np.array({_EVEN_Q})]", f"[*np.array({_READ})]")),
        Wrong(_heads(_EVEN_Q, _READ + ", r"), "the entry of rank 0 is (range(0, 4), range(0, 1), 0); it must be a "
                                              "pair")],
    "my_column_shard": [
        Wrong("def my_column_shard(source, rows): return source[rows.start:rows.stop][None]", "[1, 3, 14] comes back"),
        Wrong("def my_column_shard(source, rows): return source[-12:][rows.start:rows.stop]", "is outside 0:12"),
        Wrong("def my_column_shard(source, rows): return source[rows.start:rows.stop:2]", "slice(0, 3, 2)"),
        Right("def my_column_shard(source, rows):\n    if rows.start == 0: return source[:rows.stop]\n"
              "    return source[rows.start:] if rows.stop == source.shape[0] else source[rows.start:rows.stop:1]")],
    "my_merged": [
        Wrong("def my_merged(sources, ranges): return torch.cat([source[rows.start:rows.stop].flip(0) for source, "
              "rows in "
              "zip(sources, ranges)])", "where [q 0–7|k 0–1|v 0–1] are its own the right ones, in another order"),
        Wrong("def my_merged(sources, ranges): return torch.cat([source[rows.start:rows.stop] for source, rows in "
              "zip(sources[::-1], ranges[::-1])])", "[v 0–1|k 0–1|q 0–7] come back where")],
    "my_mask": [
        Wrong(mask("m = (torch.arange(keys) > positions[..., None])[:, None]; m[1:, ..., 0] = True; return m"),
              "the query at position 4 of sequence 1 may look at keys 0 to 4; yours looks at [1, 2, 3, 4]"),
        Wrong(mask("m = (torch.arange(keys) > positions[..., None])[:, None]; m[..., 1:, 1] = True; return m"),
              "the query at position 4 may look at keys 0 to 4; yours looks at [0, 2, 3, 4]")],
    "my_attend": [
        Right("def my_attend(q, k, v, mask, scaling): return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask, "
              "scale=scaling, enable_gqa=True)")],
    "my_rotate_half": [
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([-b, a], -1) if x.dim() == 3 else -x"),
              "-81 -100], and [-36 -49 -64 -81 -100 1 4 9 16 25] is a quarter turn")],
    "my_rope": [
        Wrong(rope(turn="cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)\n    return x * cos + "
                        "torch.stack("
                        "[-x[..., 1::2], x[..., 0::2]], -1).flatten(-2) * sin"), "the tables are made for halves")],
    "my_apply_rope": [
        Wrong(apply_rope(_CALL, "return tuple(x[0] if x.shape[1] == cos.shape[1] else x[0].transpose(0, 1) for x in "
                         "(q, k))"), "heads and tokens have changed places on the way back"),
        Wrong(apply_rope(_CALL.replace("sin)", "sin * 0)"), _BACK), "sin [1, 5, 6], sin with other numbers"),
        Wrong(apply_rope(_CALL, "return q[0].transpose(0, 1) + 1, k[0].transpose(0, 1)"), "Every number is off by +1"),
        Wrong(apply_rope(_CALL, "return [q[0].transpose(0, 1), k[0].transpose(0, 1), cos]"), "it returns a list of 3"),
        Right(apply_rope(_CALL, "return [q[0].transpose(0, 1), k[0].transpose(0, 1)]")),
        Wrong(apply_rope(f"try: {_CALL}", "except Exception: raise ValueError('cannot turn')", _BACK),
              "ValueError: cannot turn")],
    "my_positions": [
        Wrong(positions("return torch.cat([torch.arange(s, s + 2 * c, 2) for s, c in zip(starts, counts)])"),
              "yours are [3, 5, 7, 9, 11, 0, 2, 4, 6, 3, 5, 7], and [3, 4, 5, 6, 7, 0, 1, 2, 3"),
        Right(positions(f"return torch.cat({_EACH}).int()"))],
}
