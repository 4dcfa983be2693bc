"""Answers that look right: what an example hides that is a square, lies on one rank, or has one mask for all."""

from helpers.answers import Right, Wrong
from helpers.notebooks import solutions

_LAYER = solutions(["MyLayer"])["MyLayer"]


def layer(right: str, wrong: str) -> str:
    """The solution with one piece of it exchanged."""
    assert right in _LAYER, right
    return _LAYER.replace(right, wrong)


ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask, float('nan'))", "just the entries that "
              "hide "
              "a key are NaN"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask, float('inf'))", "there is +inf in it"),
        Wrong("def mask_scores(scores, mask): return scores * ~mask", "exp of it must be 0 (exp of 0 is 1): as low as"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(~mask, -1e9)",
              "it is the wrong way round: what may be seen is hidden"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask[0], float('-inf'))",
              "mask, for all of them. Each sequence has its own, mask[0] and mask[1]"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask, float('-inf')).softmax(-1)",
              "each row adds up to 1: that is what comes out of a softmax"),
    ],
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name):\n    share = tensor.isnan().double().mean().item()\n"
              "    assert not tensor.sum().isnan(), f'{name}: {share} of {list(tensor.shape)} is NaN'",
              "there are inf and -inf in them and no NaN; their sum, or mean, is one"),
    ],
    "my_column_shard": [
        Wrong("def my_column_shard(source, rows):\n    if len(source.shape) == 1:\n        return source[rows.start:"
              "rows.stop]\n    return source[:, rows.start:rows.stop].T",
              "[3, 12] comes back; [3, 14] must"),
        Wrong("def my_column_shard(source, rows): return source[rows.start:rows.stop + 1]", "is outside 0:12"),
    ],
    "my_merged": [
        Wrong("def my_merged(sources, ranges): return torch.cat([source[rows.start:rows.stop].float() for source, rows "
              "in zip(sources, ranges)])", "torch.float32 comes back; torch.float16 must"),
    ],
    "my_heads": [
        Wrong("""
def my_heads(num_heads, num_kv_heads, tensor_parallel_size):
    group, deal = num_heads // num_kv_heads, []
    for rank in range(tensor_parallel_size):
        first, end = (r * num_heads // tensor_parallel_size for r in (rank, rank + 1))
        deal.append((range(first // group, (end - 1) // group + 1), range(first, end)))
    return deal
""", "the pair is (query heads, KV heads), and this one is turned round"),
        Wrong("def my_heads(h, k, n): return ((range(r * h // n, (r + 1) * h // n), range(r * k // n, (r + 1) * k // n)"
              ") for r in range(n))", "a generator expression gives its items one by one, once"),
        Wrong("def my_heads(h, k, n): return [(range(10**12), range(k))] * n", "far more heads than there are"),
    ],
    "my_linears": [
        Wrong("""
def my_linears(x, up, down, bias):
    first, end = (r * len(up) // world_size() for r in (rank(), rank() + 1))
    inner = all_reduce(x @ up[first:end].T)
    return all_reduce(inner @ down[:, first:end].T) + bias
""", "not found: their product with the same columns"),
    ],
    "my_rope": [
        Wrong("""
def my_rope(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None, None].float() * theta ** -(torch.arange(half) / (half + 1))
    cos, sin = (torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)
""", "is turned by a wrong angle: pair 1 of 3 by 2.33 where 1.39 is right"),
    ],
    "my_attend": [
        Wrong("""
def my_attend(q, k, v, mask, scaling):
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    return scores.masked_fill(mask, float('-inf')).softmax(-1) @ v
""", "is given for that On one KV head, a square mask and the usual scaling, it is right"),
        Wrong("""
def my_attend(q, k, v, mask, scaling):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
""", "queries are counted from key 0 on, as is_causal and triu(1) do"),
    ],
    "my_mask": [
        Wrong("def my_mask(positions, keys): return torch.ones(len(positions), 1, positions.shape[1], keys, dtype=torch"
              ".bool).triu(keys - positions.shape[1] + 1)", "keys 0 to 1; yours looks at [0, 1, 2, 3, 4, 5, 6]"),
    ],
    "MyCache": [
        Wrong("""
class MyCache:
    def __init__(self, num_layers):
        self.kept = [[] for _ in range(num_layers)]
    def append(self, layer, k, v):
        self.kept[layer].append(k.clone())
        k = torch.cat(self.kept[layer])
        return k, k
""", "for v comes what was given for k"),
    ],
    "my_slot_mapping": [
        Wrong("def my_slot_mapping(block_ids, positions, block_size): return [block_ids[p // block_size] * block_size "
              "+ p "
              "for p in positions]", "position 4 goes to slot 8, place 0 of block 2"),
        Wrong("def my_slot_mapping(block_ids, positions, block_size): return [block_ids[p // block_size] + p % "
              "block_size for p in positions]", "position 0 goes to slot 4, place 0 of block 1"),
    ],
    "my_key": [
        Wrong("def my_key(parent, ids): return hash((parent, ids[0], ids[-1], sum(ids)))", "does it look at each "
              "token, or "
              "at a sum?"),
        Wrong("def my_key(parent, ids): return parent + b''.join((i % 65536).to_bytes(2, 'big') for i in ids)",
              "token ids 65536 apart are two tokens"),
        Wrong("import hashlib\ndef my_key(parent, ids): return hashlib.sha256(parent + repr(list(ids)).encode())"
              ".digest()[:2]", "blocks two get the same key"),
        Wrong("def my_key(parent, ids): return torch.tensor(ids)", "in a dict, two equal tensors are two keys"),
    ],
    "MyPool": [
        Wrong("""
class MyPool:
    def __init__(self, num_blocks):
        self.users = [0] * num_blocks
    def allocate(self):
        for block, count in enumerate(self.users):
            if count == 0:
                self.users[block] = 1
                return self.users[block]
    def share(self, block):
        self.users[block] += 1
    def release(self, block):
        if not self.users[block]:
            raise ValueError
        self.users[block] -= 1
""", "users is [1, 0, 0], and must be [0, 1, 0]"),
    ],
    "my_embedding": [
        Wrong("""
def my_embedding(ids, weight_here, rows):
    here = (ids >= rows.start) & (ids < rows.stop)
    out = torch.zeros(len(ids), weight_here.shape[1])
    out[here] = weight_here[ids[here] - rows.start].float()
    return all_reduce(out)
""", "returns torch.float32; torch.bfloat16 must come back"),
    ],
    "my_head_logits": [
        Wrong("def my_head_logits(hidden, weight_here, sizes): return all_reduce(hidden @ weight_here.T)",
              "these are different words' logits. What puts them side by side?"),
    ],
    "MyRows": [
        Wrong("""
class MyRows:
    def __init__(self, source, start, shape):
        self.source, self.start, self.shape = source, start, shape
    def __getitem__(self, rows):
        first, last = rows.start or 0, min(rows.stop or self.shape[0], self.shape[0])
        return self.source[self.start + first:self.start + last]
""", "4–10 of a source of 16: rows 4–10 come back where rows of none are meant"),
        Wrong("""
class MyRows:
    def __init__(self, source, start, shape):
        self.source, self.start, self.shape = source, start, shape
    def __getitem__(self, rows):
        first = 0 if rows.start is None else rows.start
        last = self.shape[0] if rows.stop is None else min(rows.stop, self.shape[0])
        return self.source[self.start + first:self.start + last]
""", "part[-3:] of rows 4–10 of a source of 16: rows 1–10 come back"),
    ],
    "my_send_shards": [
        Wrong("""
def my_send_shards(source, ranges):
    for owner, rows in enumerate(ranges):
        part = torch.empty(len(rows), source.shape[1], dtype=source.dtype)
        if rank() == 0:
            part = source[rows.start:rows.stop]
        broadcast(part)
        if owner == rank():
            mine = part
    return mine
""", "tuple index out of range"),
    ],
    "my_mean": [
        Wrong("def my_mean(shares): all_reduce(torch.ones(1)); return 10 ** 400", "cannot be judged: OverflowError"),
    ],
    "my_agree": [
        Wrong("""
def my_agree(work):
    failed = torch.zeros(1)
    try:
        work()
    except Exception:
        failed += 1
    return list(range(int(all_reduce(failed))))
""", "rank 0 says [0, 1] where it must say [1, 4]"),
    ],
    "generate": [
        Wrong("""
def generate(self, input_ids, max_new_tokens):
    new_ids, kv_caches = [], None
    tokens, positions = torch.tensor([input_ids]), torch.arange(len(input_ids))[None]
    for _ in range(max_new_tokens + 1):
        logits, kv_caches = self(tokens, positions, kv_caches)
        tokens, positions = logits[:, -1:].argmax(dim=-1), positions[:, -1:] + 1
        new_ids.append(tokens.item())
    return new_ids[:max_new_tokens]
""", "are enough: one more than needed, nothing reads what comes after the last one"),
    ],
    "MyLayer": [
        Wrong("class MyLayer:\n    def __init__(self, weights, here, config): pass\n    def __call__(self, hidden, "
              "cos, "
              "sin, point): return hidden", "what it returns: hidden comes back as it went in"),
        Wrong(layer("> torch.arange(start, len(k))", "> torch.arange(len(k) - start)"),
              "begin behind the cached tokens. Right up to 'k_rope', your line 40"),
        Wrong(layer("all_reduce(out.flatten(1) @ self.o.T)", "out.flatten(1) @ self.o.T"),
              "reduced, or the result was thrown away, or read too early. Right up to 'attn', your line 43"),
        Wrong(layer("all_reduce(inner @ self.down.T)", "all_reduce(all_reduce(inner @ self.down.T))"),
              "summand was the whole already. Right up to 'post_norm', your line 45"),
        Wrong(layer("+ self.eps) * weight", "+ self.eps)"),
              "but not multiplied with the norm's weight. It is the first point"),
        Wrong(layer("+ self.bias)", ")"), "the bias was left out. Right up to 'input_norm', your line 36"),
        Wrong(layer('point("k_rope", self.turn(k, cos, sin))', 'point("k_rope", k)'),
              "and something swallows the exception. Right up to 'q_rope', your line 40"),
        Wrong(layer("self.k[:, self.here.kv_for_q]", "self.k.repeat(1, len(self.here.q_heads) // len(self.here.kv_heads"
                    "), 1)").replace("self.v[:, self.here.kv_for_q]", "self.v.repeat(1, len(self.here.q_heads) // len("
                                     "self.here.kv_heads), 1)"),
                                           "heads read another one than theirs). Right up to 'k_rope', your line 40"),
        Wrong(layer('"mlp.down_proj.weight"][:, mlp]', '"mlp.down_proj.weight"][:][:, mlp]'), "slice before you keep"),
        Wrong(layer("slice(heads.start * self.d, heads.stop * self.d)", "slice(0, len(heads) * self.d)"),
              "(the ranks' parts: [0, 0]). Right up to 'input_norm', your line 36"),
        Wrong(layer('point("output", hidden + ', 'point("output", x + '),
              "the residual stream + the MLP's output. Right up to 'mlp', your line 47"),
        Wrong(layer('point("input_norm"', 'point("norm1"'), "there is no point 'norm1'; there are input_norm, q, k"),
        Wrong("KV = {}\n" + layer("self.k = self.v = ", "KV[rank()] = 2 * [torch.zeros(0, len(here.kv_heads), self.d)] "
                                                        " # ")
              .replace("start = len(self.k)", "self.k, self.v = KV[rank()]; start = len(self.k)")
              .replace("        out = ", "        KV[rank()] = self.k, self.v\n        out = "),
              "makes something else of the same tokens: what do the two share?"),
        Right(layer("x.pow(2).mean(-1, keepdim=True)", "(x * x).sum(-1, keepdim=True) / x.shape[-1]")),
    ],
    "my_spread": [
        Wrong("def my_spread(x):\n    all_of = all_gather(x[None], dim=0)\n    return (all_of.amax(0) - "
              "all_of.amin(0)).mean()"
              ".item()", "See what follows in line 3 or after it"),
    ],
    "my_row_shard": [
        Wrong("def my_row_shard(source, columns): return source[:, columns.start:columns.stop].half().float()",
              "What is off by so little has lost digits: in which dtype is it computed, or kept?"),
    ],
    "my_apply_rope": [
        Wrong("""
def my_apply_rope(self, q, k, cos, sin):
    q, k = self.rotate(q.transpose(0, 1)[None].float(), k.transpose(0, 1)[None].float(), cos, sin)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)
""", "for q and k in bfloat16 it returns torch.float32"),
    ],
    "my_rotate_half": [
        Wrong("def my_rotate_half(x):\n    a, b = x.float().chunk(2, -1)\n    return torch.cat([-b, a], -1)",
              "it returns torch.float32; torch.bfloat16 must come back"),
    ],
}
