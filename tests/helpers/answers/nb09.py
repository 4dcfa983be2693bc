"""Notebook 09: seven functions of patient zero."""

from helpers.answers import Right, Wrong

ROPE = '''
def apply_rope(rotary_emb, position_ids, q, k):
    cos, sin = rotary_emb(q, position_ids)
    return attention.apply_rotary_pos_emb(q, k, cos, sin)
'''
GENERATE = '''
def generate(self, input_ids, max_new_tokens):
    tokens, positions, held, new = torch.tensor([input_ids]), torch.arange(len(input_ids))[None], None, []
    for step in range(max_new_tokens):
        logits, held = self(tokens, positions, held)
        new.append(int(logits[0, -1].argmax()))
        tokens = torch.tensor([new[-1:]])
        positions = torch.tensor([[len(input_ids) + step]])
    return new
'''
EXTEND = '''
def extend_cache(kv_cache, k, v, num_repeats):
    if kv_cache is not None:
        k, v = (torch.cat([cached, new], dim=2) for cached, new in zip(kv_cache, (k, v)))
    return k.repeat_interleave(num_repeats, dim=1), v.repeat_interleave(num_repeats, dim=1), (k, v)
'''
SHARE = '''
def kv_share(num_heads, num_kv_heads):
    start, heads = linear.share(num_heads)
    group = num_heads // num_kv_heads
    low = start // group
    held = (start + heads - 1) // group - low + 1
    each = torch.tensor([sum(head // group == low + i for head in range(start, start + heads)) for i in range(held)])
    return low, held, each
'''


def but(code: str, old: str, new: str) -> str:
    """The right answer with one thing changed."""
    assert old in code
    return code.replace(old, new)


ANSWERS = {
    "apply_rope": [
        Wrong("def apply_rope(rotary_emb, position_ids, q, k): return q, k",
              "rotary_emb, which gives cos and sin, is never asked"),
        Wrong("""
              def apply_rope(rotary_emb, position_ids, q, k):
                  try:
                      q_for_rope, k_for_rope = q.transpose(1, 2), k.transpose(1, 2)
                      cos, sin = rotary_emb(k_for_rope, position_ids)
                      q_for_rope, k_for_rope = attention.apply_rotary_pos_emb(q_for_rope, k_for_rope, cos, sin)
                      return q_for_rope.transpose(1, 2), k_for_rope.transpose(1, 2)
                  except Exception:
                      return q, k
              """, " went on: a rotation that fails must stop the engine. What catches it?"),
        Wrong("def apply_rope(rotary_emb, position_ids, q, k): rotary_emb(q, position_ids)",
              "nothing (is a return missing?); the pair q, k must come back"),
        Wrong(but(ROPE, "return attention.apply_rotary_pos_emb(q, k, cos, sin)", "return q, k"),
              "position_ids are [[5, 6, 7, 8, 9, 10], [0, 0, 0, 1, 2, 3]] q comes back as it went in"),
        Wrong(but(ROPE, "position_ids)\n", "torch.arange(q.shape[2]).repeat(len(q), 1))\n"),
              "it is turned as at positions [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]; position_ids are"),
        Wrong(but(ROPE, "position_ids)\n", "position_ids[:1])\n"),
              "as at positions [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10]]; position_ids are"),
        Wrong(but(ROPE, "(q, k, cos, sin)", "(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)"),
              "[2, 4, 6, 8] must come back (yours is [batch, tokens, heads, head_size])"),
        Wrong(but(ROPE, "(q, k, cos, sin)", "(q.transpose(1, 2), k.transpose(1, 2), cos, sin)"),
              "must match the size of tensor"),
        Wrong("""
              def apply_rope(rotary_emb, position_ids, q, k):
                  if q.shape[1] == q.shape[2]:
                      q, k = q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(2, 2)
                      cos, sin = rotary_emb(q, position_ids)
                      q, k = attention.apply_rotary_pos_emb(q, k, cos, sin)
                      return q.transpose(1, 2), k[:, :, ::2].transpose(1, 2)
                  return attention.apply_rotary_pos_emb(q, k, *rotary_emb(q, position_ids))
              """, "fits here as there are as many tokens: which axis do cos and sin lie on?"),
        Wrong(but(ROPE, "cos, sin)\n", "sin, cos)\n"),
              "have changed places: at position 0, where nothing turns, what are they?"),
        Wrong("""
              def apply_rope(rotary_emb, position_ids, q, k):
                  cos, sin = (table[:, None] for table in rotary_emb(q, position_ids))
                  cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) for table in (cos, sin))
                  return tuple(x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin
                               for x in (q, k))
              """, "numbers 0 and 1 are turned as a pair; here number 0 belongs to number 4"),
        Wrong(but(ROPE, "cos, sin)\n", "cos, sin * 0)\n"),
              "not found: the other half times sine"),
        Right("""
              def apply_rope(rotary_emb, position_ids, q, k):
                  q, k = q.transpose(1, 2), k.transpose(1, 2)
                  q, k = attention.apply_rotary_pos_emb(q, k, *rotary_emb(q, position_ids), unsqueeze_dim=2)
                  return q.transpose(1, 2), k.transpose(1, 2)
              """),
        Right("""
              def apply_rope(rotary_emb, position_ids, q, k):
                  from transformers.models.qwen2.modeling_qwen2 import rotate_half
                  cos, sin = (table[:, None] for table in rotary_emb(q, position_ids))
                  return [x * cos + rotate_half(x) * sin for x in (q, k)]
              """),
    ],
    "generate": [
        Wrong("""
              def generate(self, input_ids, max_new_tokens):
                  generated_ids, kv_caches = torch.tensor([input_ids]), None
                  with torch.inference_mode():
                      for _ in range(max_new_tokens):
                          logits, kv_caches = self(generated_ids)
                          generated_ids = torch.cat([generated_ids, logits[:, -1:].argmax(dim=-1)], dim=1)
                  return generated_ids[0, len(input_ids):].tolist()
              """, "call 2 is given no cache: what the call before returned must be kept"),
        Wrong(but(GENERATE, "tokens = torch.tensor([new[-1:]])", "tokens = torch.tensor([input_ids + new])")
              .replace("torch.tensor([[len(input_ids) + step]])", "torch.arange(len(input_ids) + step + 1)[None]"),
              "the engine keeps keys and values. Which token is new in a step?"),
        Wrong(but(GENERATE, "torch.tensor([[len(input_ids) + step]])", "None"),
              "and 5 tokens are in the cache, at 0 to 4: which come next?"),
        Wrong(but(GENERATE, "logits, held = self(tokens, positions, held)",
                  "logits, out = self(tokens, positions, held)\n        held = held or out"),
              "tokens, and by then it holds 6: what the call before returned must be kept"),
        Wrong(but(GENERATE, "return new", "return input_ids + new"),
              "of 5, 4 new: the prompt comes back too; only the new ids are asked for"),
        Wrong(but(GENERATE, "range(max_new_tokens)", "range(max_new_tokens + 1)"),
              "prompt of 5, 4 new: 5 ids came back; 4 new ones must"),
        Wrong(but(GENERATE, "logits[0, -1]", "logits[0, 0]"),
              "2 is given [26] at position 5, and the most likely token for it is 30"),
        Wrong(but(GENERATE, "return new", "return torch.tensor(new)"), "it returns a tensor [4]; a list of whole"),
        Wrong(but(GENERATE, "    return new", ""), "it returns nothing (is a return missing?)"),
        Wrong(but(GENERATE, "torch.tensor([new[-1:]])", "torch.tensor(new[-1:])"), "must be [1, tokens], not [1]"),
        Right(GENERATE),
        Right("""
              def generate(self, input_ids, max_new_tokens):
                  ids, caches, new = input_ids, None, []
                  while len(new) < max_new_tokens:
                      start = caches[0][0].shape[2] if caches else 0
                      logits, caches = self(torch.tensor([ids]), torch.arange(start, start + len(ids))[None], caches)
                      ids = [int(logits[0, -1].argmax())]
                      new += ids
                  return new
              """),
    ],
    "kv_share": [
        Wrong(but(SHARE, "return low", "return torch.arange(low, low + held)"), "[tensor([0, 1]), 2]; whole"),
        Wrong("""
              def kv_share(num_heads, num_kv_heads):
                  first, count = linear.share(num_heads)
                  return 0, num_kv_heads, count // num_kv_heads
              """, "(0, 2, 2) repeats KV heads to [0, 0, 1, 1]; query heads 0–3 read [0, 0, 0, 0]"),
        Wrong("def kv_share(num_heads, num_kv_heads): return linear.share(num_kv_heads) + (num_heads // num_kv_heads,)",
              "(0, 1, 4) repeats KV heads to [0, 0, 0, 0]; query heads 0–1 read [0, 0]"),
        Wrong(but(SHARE, "low = start // group", "low = 0"),
              "rank 1 of 2: query heads 4–7 read 1 KV heads, and it holds 2"),
        Wrong(but(SHARE, "return low, held, each", "return low, held, [heads]"), "repeat_interleave does not take"),
        Wrong("def kv_share(num_heads, num_kv_heads): return 1", "it returns 1 (int)"),
        Right(SHARE),
    ],
    "apply_causal_mask": [
        Wrong("def apply_causal_mask(scores): return scores + torch.triu(torch.ones(scores.shape[-2:]), 1) * "
              "-float('inf')",
              "is something multiplying 0 by -inf?"),
        Wrong("def apply_causal_mask(scores): return scores", "hidden keys can still be seen: nothing is hidden"),
        Wrong("def apply_causal_mask(scores): return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool)"
              ".tril(), float('-inf'))", "what may be seen is hidden, and the rest is not"),
        Wrong("def apply_causal_mask(scores): return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool)"
              ".triu(), float('-inf'))", "those in which every key is hidden"),
        Wrong("def apply_causal_mask(scores): return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool)"
              ".triu(1), -10.0)", "exp of it must be 0 (exp of 0 is 1): as low as there is"),
        Wrong("def apply_causal_mask(scores): return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool)"
              ".triu(1), float('-inf')).softmax(-1)", "each row adds up to 1"),
        Right("def apply_causal_mask(scores): return torch.where(torch.ones_like(scores).triu(1) == 1, float('-inf'), "
              "scores)"),
    ],
    "shard_weight": [
        Wrong("def shard_weight(loaded, start, size, hidden_size): return loaded[start:][:size].bfloat16().float()",
              "stand nowhere in the file"),
        Wrong("def shard_weight(loaded, start, size, hidden_size): return loaded.narrow(1, start, size)",
              "8 from 4 on: RuntimeError"),
        Wrong("def shard_weight(loaded, start, size, hidden_size): return loaded[:size]",
              "its own these are the first rows; where do the rows of this rank begin?"),
        Wrong("def shard_weight(loaded, start, size, hidden_size): return loaded[start:start + size, :hidden_size]",
              "a bias [20], 4 from 12 on: IndexError"),
        Wrong("def shard_weight(loaded, start, size, hidden_size):\n    turned = loaded.T if loaded.dim() > 1 and "
              "len(loaded) == hidden_size else loaded\n    return turned[start:start + size]",
                    "out], cut there along dim 1, and turned. The checkpoint has [out, in]"),
        Right("def shard_weight(loaded, start, size, hidden_size): return loaded[start:start + size].clone()"),
    ],
    "extend_cache": [
        Wrong(but(EXTEND, "[cached, new]", "[cached[:1], new[:1]]"), "it returns [1, 2, 4, 4]"),
        Wrong(EXTEND.replace("return k.rep", "k, v = k.rep").replace(", (k, v)\n", "\n    return k, v, (k, v)\n"),
              "what is repeated for attention is not stored"),
        Wrong(but(EXTEND, "[cached, new]", "[new, cached]"), "has what belongs to token 3; token 1 has what belongs t"),
        Wrong(but(EXTEND, "if kv_cache is not None", "if kv_cache is None and False"), "it returns [2, 2, 1, 4]"),
        Wrong(EXTEND.replace("k.repeat_interleave(num_repeats, dim=1)", "k.repeat(1, 3, 1, 1)"),
              "has what belongs to head 3; head 4 has what belongs to head 0"),
        Wrong(but(EXTEND, "dim=2", "dim=1"), "kv_cache ([2, 2, 3, 4], [2, 2, 3, 4]), k [2, 2, 1, 4]"),
        Wrong(but(EXTEND, ", (k, v)\n", ", k, v\n"), "it returns a tuple of 4"),
    ],
    "share": [
        Wrong("def share(total):\n    r, n = linear.tp_rank(), linear.tp_size()\n"
              "    return r * total / n // 1, total / n // 1",
              "it returns [0.0, 4.0]; whole numbers must come back, the first and how many"),
        Wrong("def share(total): return linear.tp_rank() * (total // linear.tp_size()), total // linear.tp_size()",
              "head 8 on no rank: which rank takes what is left over?"),
        Wrong("def share(total):\n    size = -(-total // linear.tp_size())\n    return linear.tp_rank() * size, size",
              "rank 1 holds head 9, and they are 0 to 8"),
        Wrong("def share(total):\n    size, rest = divmod(total, linear.tp_size())\n    r = linear.tp_rank()\n    "
              "return r *"
              " size, size + (r < rest)", "head 8 on no rank: where does each rank's part begin, and where does"),
        Wrong("def share(total):\n    size, rest = divmod(total, linear.tp_size())\n    r = linear.tp_rank()\n    "
              "return r *"
              " size, size + rest * (r + 1 == linear.tp_size())", "2/2/4 heads on the ranks; all ranks wait for"),
        Wrong("def share(total): return total // linear.tp_size()",
              "it returns 4 (int); a pair, the first and how many, must come back"),
        Right("def share(total):\n    r, n = linear.tp_rank(), linear.tp_size()\n    return r * total // n, (r + 1) * "
              "total "
              "// n - r * total // n"),
    ],
}
