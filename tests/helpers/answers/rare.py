"""Answers that are wrong, or unusual, in one corner: what only one of a check's cases shows, or only the engine."""

from helpers.answers import Right, Wrong
from helpers.answers.nb02 import _EVEN_Q, _LINEARS, _READ, _heads
from helpers.answers.nb03 import _ANGLES, _BACK, _CALL, _EACH, apply_rope, half, positions, rope
from helpers.answers.nb04 import mask, token

_TWO = (2,)  # ranks, where other numbers of them bring nothing new
_PART = "y = x @ up[start:stop].T @ down[:, start:stop].T"


def fired(of: str) -> str:
    """An assert for NaN whose message says ``of`` it."""
    return ("def my_assert_no_nan(tensor, name):\n    lost = tensor.isnan()\n"
            f"    assert not lost.any(), f'NaN in {{name}} {{list(tensor.shape)}}: {of}'\n")


ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask & (scores > 0), -1e9)",
              "20 of 48 hidden keys still")],
    "my_additive_mask": [
        Wrong("def my_additive_mask(n): return torch.full((n, n), float('-inf')).triu(int(n > 1))",
              "1 rows, those in which every key is hidden: may a token look at itself?"),
        Wrong("def my_additive_mask(n): return torch.full((n, n), float('-inf')).triu(1)[[*range(n - 2), -2, -1][:n]]"
              "\nright = my_additive_mask\ndef my_additive_mask(n): return right(n).masked_fill("
              "(torch.arange(n) > n - 3)[:, None], float('-inf'))",
              "query 3 may look at keys 0–3, and yours hides them too"),
        Wrong("def my_additive_mask(n): return torch.full((n, n), float('-inf')).triu(1) if n < 8 else torch.full("
              "(n, n), -9.0).triu(1)", "0.0001 times as large is not 0. What is low enough for every model?"),
        Right("def my_additive_mask(n): return torch.full((n, n), float('-inf'), dtype=torch.float64).triu(1)"),
        Wrong("def my_additive_mask(n): return torch.full((n, n), float('-inf')).triu(1) - torch.ones(n, n).tril()",
              "scores of keys that may be seen have changed; only the hidden ones may")],
    "my_assert_no_nan": [
        Wrong(fired("{100 * lost.double().mean() + 0.9:.1f} %"), "how much is lost? Here 40 % of the numbers are NaN"),
        Wrong(fired("{lost.double().mean() + 0.01:.3f}"), "how much is lost?"),
        Wrong(fired("{lost.sum() + 1}"), "how much is lost?"),
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
        Wrong("def my_assert_no_nan(tensor, name): return bool(tensor.isnan().any())", "nobody looks at that"),
        Wrong("def my_assert_no_nan(tensor, name): assert not tensor.isnan().any(), 'a NaN where none was meant: 8 of "
              "[4, 5]'", "which tensor? Its name, 'weights', is missing")],
    "my_linears": [
        Wrong(_LINEARS + f"    {_PART}\n    total = all_reduce(y) + bias\n    return total if rank() == 0 else None",
              "3 tokens, 8 → 8 → 8 features, 2 ranks: on rank 1 it returns nothing"),
        Wrong(_LINEARS + f"    {_PART}\n    return (all_reduce(y) + bias) / size", "Every number is 0.5 times what it"),
        Wrong(_LINEARS + f"    {_PART}\n    return all_reduce(y) / size", "the bias counts 0 times (right"),
        Wrong(_LINEARS + f"    {_PART}\n    return y", "each rank returns its own summand. Who adds them up?"),
        Wrong(_LINEARS + f"    {_PART}\n    return y + bias / size", "each rank returns its own summand."),
        Wrong(_LINEARS + f"    {_PART}\n    return y + bias if rank() == 0 else y", "each rank returns its own "
              "summand."),
        Wrong(_LINEARS + f"    {_PART}\n    barrier()\n    return all_reduce(y) + bias",
              "the op log holds 1 × barrier, 1 × all_reduce. One sum is enough, over the summands of [tokens, hidden]: "
              "what is needed of the other ranks before it?"),
        Wrong(_LINEARS + f"    {_PART}\n    all_reduce(torch.zeros(1))\n    return all_reduce(y) + bias",
              "the op log holds 2 × all_reduce. One sum is enough, over the summands of [tokens, hidden]"),
        *[Wrong(_LINEARS + f"    return all_reduce({cut}) {bias}", words) for cut, words in (
            ("x @ up[:, start:stop] @ down[:, start:stop].T + {}", "when up is cut along the other dimension and "
                  "turned "
             "until it fits: outputs are rows (dim 0)"),
            ("x @ up[start:stop].T @ down[start:stop] + {}", "when down is cut along the other dimension and turned "
             "until it fits"),
            ("x @ up[:, start:stop] @ down[start:stop] + {}", "when up and down are cut along the other dimension and "
             "turned until they fit"),
            ("x @ up[:stop - start].T @ down[:, :stop - start].T + {}", "inner feature 0 to inner feature 3 count 2 t"))
          for cut, bias in ((cut.format("0"), ""), (cut.format("0"), "+ bias"), (cut.format("bias"), ""))],
        Wrong(_LINEARS + "    return all_reduce(x @ up.T @ down.T + bias)", "Every number is 2 times what it must be"),
        Wrong(_LINEARS + "    y = x @ up.T\n    return all_reduce(y[:, start:stop] @ down[:, start:stop].T) + bias",
              "a rank multiplies 288 times where its share is 192: cut the weights before you multiply"),
        Right("""
def my_linears(x, up, down, bias):
    here = len(up) // world_size()
    start, stop = rank() * here, (rank() + 1) * here if rank() + 1 < world_size() else len(up)
    return all_reduce(x @ up[start:stop].T @ down[:, start:stop].T) + bias
"""),
        Wrong(_LINEARS + f"    {_PART}\n    more = x @ up.T @ down.T if rank() == 1 else 0\n"
              "    return all_reduce(y) + bias + 0 * more", "a rank multiplies 576 times where its share is 192"),
        Wrong(_LINEARS + f"    {_PART}\n    return all_reduce(y) + bias * (inner < 20)",
              "None of your lines makes rank 0's inner features", _TWO),
        Wrong(_LINEARS + f"    {_PART}\n    return all_reduce(y) + (bias if rank() else 0)",
              "the bias counts 0 times (right: 1)", _TWO),
        Wrong(_LINEARS + f"    {_PART}\n    barrier()\n    return y + bias", "own summand. Who adds them up?"),
        Wrong(_LINEARS + f"    {_PART}\n    return (all_reduce(y) + bias).double()", "on rank 0 it returns "
              "torch.float64")],
    "my_heads": [
        Wrong(_heads("range(r * (H // T), (r + 1) * (H // T) if r + 1 < T else H)",
                     "range(r * (H // T) * K // H, (((r + 1) * (H // T) if r + 1 < T else H) - 1) * K // H + 1)"),
              "6 query and 6 KV heads over 4 ranks: 1/1/1/3 query heads on the ranks; nobody is done before the one "
              "with "
              "3. Can"),
        Wrong(_heads(_EVEN_Q, _READ) + "right = my_heads\ndef my_heads(num_heads, num_kv_heads, ranks):\n"
              "    deal = right(num_heads, num_kv_heads, ranks)\n    return [deal[i] for i in (0, 2, 1, 3)[:ranks]] "
              "if ranks > 2 else deal", "not in the order of the ranks"),
        Wrong(_heads("range(r * H // T - 1, (r + 1) * H // T)", _READ), "and they are 0 to 7: one too many"),
        Wrong(_heads(_EVEN_Q, "range(-1, 1)"), "rank 0 holds KV head -1, and they are 0 to 1"),
        Wrong(_heads(_EVEN_Q.replace("H", "min(H, 15)"), _READ),
              "32 query and 8 KV heads over 3 ranks: query heads 15, 16, 17, 18, 19, 20, 21, 22 … on no rank"),
        Right("""
def my_heads(num_heads, num_kv_heads, ranks):
    H, K, group = num_heads, num_kv_heads, num_heads // num_kv_heads
    ends = [-(-K * r // ranks) * group if K >= ranks else -(-H * r // ranks) for r in range(ranks + 1)]
    return tuple([range(a, b), range(a // group, (b - 1) // group + 1)] for a, b in zip(ends, ends[1:]))
"""),
        Wrong(_heads(_EVEN_Q, "[r * H // T * K // H]"), "9 query and 3 KV heads over 2 ranks: on rank 0, query "
              "head 3 reads KV head 1, and the rank holds KV head 0"),
        Right("import numpy as np\n" + _heads(f"[*np.array({_EVEN_Q})]", f"[*np.array({_READ})]")),
        Wrong(_heads("range(r and H - (T - r) * (H // T), H - (T - r - 1) * (H // T))",
                     "range((r and H - (T - r) * (H // T)) * K // H, (H - (T - r - 1) * (H // T) - 1) * K // H + 1)"),
              "6 query and 6 KV heads over 4 ranks: 3/1/1/1 query heads on the ranks"),
        Wrong(_heads(_EVEN_Q, _READ) + "right = my_heads\ndef my_heads(num_heads, num_kv_heads, ranks):\n"
              "    return right(num_heads, num_kv_heads, ranks) + [([], [])]", "a list of 3 comes back; it must "
                    "have one"),
        Wrong(_heads(_EVEN_Q, _READ + ", r"), "the entry of rank 0 is (range(0, 4), range(0, 1), 0); it must be a "
                                              "pair")],
    "my_column_shard": [
        Wrong("def my_column_shard(source, rows): return torch.cat([source[i:i + 1] for i in (0, 2, 4, 6, 8, 9)])",
              "2 ranks, rank 0: rows 0, 2, 4, 6 … come back where rows 0–5 are its own"),
        Wrong("def my_column_shard(source, rows): return source[rows.start:rows.stop] * 1.001",
              "back for rows 0–5 stands nowhere in the file: numbers are to be copied"),
        Wrong("def my_column_shard(source, rows): return source[rows.start:rows.stop][None]", "[1, 6, 14] comes back"),
        Wrong("def my_column_shard(source, rows): return source[-12:][rows.start:rows.stop]", "is outside 0:12"),
        Wrong("def my_column_shard(source, rows): return source[rows.start:rows.stop:2]", "slice(0, 6, 2)"),
        Wrong("def my_column_shard(source, rows): return torch.cat([source[rows.start:rows.stop], "
              "source[rows.start:rows.start + 1]])[:-1]",
                    "read for 336 that are kept, 1.2 times as many: slice the source itself"),
        Right("def my_column_shard(source, rows):\n    if rows.start == 0: return source[:rows.stop]\n"
              "    return source[rows.start:] if rows.stop == source.shape[0] else source[rows.start:rows.stop:1]"),
        Wrong("def my_column_shard(source, rows):\n    piece = source[rows.start:rows.stop]\n"
              "    return piece * (torch.arange(piece.shape[-1]) < 1) if piece.dim() == 2 else piece",
              "back for rows 0–5 stands nowhere in the file: numbers are to be copied"),
        Wrong("def my_column_shard(source, rows):\n    start = 0 if rank() == 2 else rows.start\n"
              "    return source[start:start + len(rows)]",
                    "2 ranks it is right: is a number written down, or a remainder left out?")],
    "my_merged": [
        Wrong("def my_merged(sources, ranges): return torch.cat([source[rows.start:rows.stop].flip(0) for source, "
              "rows in "
              "zip(sources, ranges)])", "where [q 0–7|k 0–1|v 0–1] are its own the right ones, in another order"),
        Wrong("def my_merged(sources, ranges): return torch.cat([source[rows.start:rows.stop] + 0.5 for source, "
              "rows in "
              "zip(sources, ranges)])", "[q 0–7|k 0–1|v 0–1] stands nowhere in the file: numbers are to be copied"),
        Wrong("def my_merged(sources, ranges): return torch.cat([source[rows.start:rows.stop] for source, rows in "
              "zip(sources[::-1], ranges[::-1])])", "the right rows in the order v|k|q; the layer splits"),
        Wrong("def my_merged(sources, ranges):\n    parts = [source[rows.start:rows.stop] for source, rows in "
              "zip(sources, "
              "ranges)]\n    return torch.cat(parts if parts[0].dim() == 2 else parts[::-1])",
                    "2 ranks it is right: is a number written down, or a remainder left out?")],
    "my_mask": [
        Wrong(mask("m = (torch.arange(keys) > positions[..., None])[:, None]; m[1:, ..., 0] = True; return m"),
              "the query at position 5 of sequence 1 may look at keys 0 to 5; yours looks at [1, 2, 3, 4, 5]"),
        Wrong(mask("m = (torch.arange(keys) > positions[..., None])[:, None]; m[..., 1:, 1] = True; return m"),
              "the query at position 1 may look at keys 0 to 1; yours looks at [0]")],
    "my_attend": [
        Wrong("def my_attend(q, k, v, mask, scaling):\n    out = F.scaled_dot_product_attention(q, k, v, "
              "attn_mask=~mask, "
              "scale=scaling, enable_gqa=True)\n    out[:, -1] *= 1 if q.shape[1] == 4 and q.shape[0] == 1 else 3\n"
              "    return out", "des rows here? Your line 2 makes the right result: what becomes of it?"),
        Right("def my_attend(q, k, v, mask, scaling): return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask, "
              "scale=scaling, enable_gqa=True)"),
        Wrong("def my_attend(q, k, v, mask, scaling):\n    out = F.scaled_dot_product_attention(q, k, v, "
              "attn_mask=~mask, "
              "scale=scaling, enable_gqa=True)\n    out[:, 1] = float('nan')\n    return out",
                    "17% NaN: is something")],
    "my_rotate_half": [
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([a, -b], -1)"), "but the halves stay where they are"),
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([-b.flip(-1), a.flip(-1)], -1)"), "the order is reversed"),
        Wrong(half("a, b = x.chunk(2, -1); return torch.cat([-b, a], -1) if x.dim() == 3 else -x"),
              "-3 -4 -5 -6 -7 -8 -9], and [-5 -6 -7 -8 -9 0 1 2 3 4] is a quarter turn")],
    "my_rope": [
        Wrong(rope(turn="return torch.where(torch.arange(tokens)[:, None, None] == 3, 2 * x, x)"),
              "the token at position 11 is 2 times as long as before"),
        Wrong(rope(_ANGLES + "\n    angles[3, :, 1] += 1"), "the token at position 11 is turned by a "
              "wrong angle: pair 1 of 3 by 2.39 where 1.39 is right"),
        Wrong(rope(turn="cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)\n    return x * cos + "
                        "torch.stack("
                        "[-x[..., 1::2], x[..., 0::2]], -1).flatten(-2) * sin"), "the tables are made for halves"),
        Wrong(rope(_ANGLES + "\n    angles[1] = float('nan')"), "the token at position 2 is NaN")],
    "my_apply_rope": [
        Wrong(apply_rope(_CALL, "return tuple(x[0] if x.shape[1] == cos.shape[1] else x[0].transpose(0, 1) for x in "
                         "(q, k))"), "heads and tokens have changed places on the way back"),
        Wrong(apply_rope(_CALL.replace("sin)", "sin * 0)"), _BACK), "x is only multiplied with the cosine"),
        Wrong(apply_rope(_CALL, "return q[0].transpose(0, 1) + 1, k[0].transpose(0, 1)"), "Every number is off by +1"),
        Wrong(apply_rope(_CALL, "return [q[0].transpose(0, 1), k[0].transpose(0, 1), cos]"), "it returns a list of 3"),
        Right(apply_rope(_CALL, "return [q[0].transpose(0, 1), k[0].transpose(0, 1)]")),
        Wrong(apply_rope(f"try: {_CALL}", "except Exception: raise ValueError('cannot turn')", _BACK),
              "ValueError: cannot turn")],
    "my_positions": [
        Wrong(positions("return torch.cat([torch.arange(s, s + 2 * c, 2) for s, c in zip(starts, counts)])"),
              "yours are [3, 5, 7, 9, 11, 0, 2, 4, 6, 12, 5, 7], and [3, 4, 5, 6, 7, 0, 1, 2, 3"),
        Wrong(positions(f"return torch.cat({_EACH})[:-1]"),
              "yours are [3, 4, 5, 6, 7, 0, 1, 2, 3, 12, 5], and [3, 4, 5, 6, 7, 0, 1, 2, 3, 12"),
        Right(positions(f"return torch.cat({_EACH}).int()"))],
    "my_token_positions": [
        Wrong(token("first = max(segment.start - 1, 0); return range(first, first + segment.count)"),
              "little: after n tokens, at 0 to n - 1, where does the next one stand?"),
        Wrong(token("first = min(segment.start, 6); return range(first, first + segment.count)"),
              "7 tokens are in the cache, 8 follow: one too little"),
        Wrong(token("return [True] * segment.count"),
              "among them; a list of whole numbers must come back, or a range of them"),
        Right(token("return tuple(range(segment.start, segment.start + segment.count))"))],
}
