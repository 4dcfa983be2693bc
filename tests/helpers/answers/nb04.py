"""Notebook 04: positions behind a cache, grouped attention, the cache, the mask."""

from helpers.answers import Right, Wrong


def attend(*lines, copies="k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))"):
    return "def my_attend(q, k, v, mask, scaling):\n    " + "\n    ".join([copies, *lines])


def cache(append, *, init="self.k, self.v = [None] * num_layers, [None] * num_layers", head="class MyCache:"):
    return "\n".join([head, "    def __init__(self, num_layers):", f"        {init}",
                      "    def append(self, layer, k, v):", *(f"        {line}" for line in append)]) + "\n"


def mask(line):
    return f"def my_mask(positions, keys): {line}"


_SCORES = "scores = q @ k.transpose(2, 3) * scaling"
_HIDE = "scores = scores.masked_fill(mask, float('-inf'))"
_OUT = "return torch.softmax(scores, dim=-1) @ v"
_JOIN = ("old_k, old_v = self.k[layer], self.v[layer]",
         "self.k[layer] = k.clone() if old_k is None else torch.cat([old_k, k])",
         "self.v[layer] = v.clone() if old_v is None else torch.cat([old_v, v])",
         "return self.k[layer], self.v[layer]")

ANSWERS = {
    "my_attend": [
        Wrong("def my_attend(q, k, v, mask, scaling): return q", "q comes back as it went in"),
        Wrong(attend(_SCORES, _HIDE, _OUT, copies="n = q.shape[1] // k.shape[1]; "
                     "k, v = (x.repeat(1, n, 1, 1) for x in (k, v))"),
              "in which order must the copies lie?"),
        Wrong(attend(_SCORES, _HIDE, _OUT, copies="pass"), "RuntimeError: The size of tensor a (6) must match"),
        Wrong(attend(_SCORES.replace(" * scaling", ""), _HIDE, _OUT), "all, and scaling (0.3) is given for that Your"),
        Wrong(attend(_SCORES.replace("*", "/"), _HIDE, _OUT), "s are multiplied with 1 / scaling, and scaling (0.3) i"),
        Wrong(attend(_SCORES + " * scaling", _HIDE, _OUT), " are multiplied with scaling ** 2, and scaling (0.3) is g"),
        Wrong(attend(_SCORES, _HIDE, _OUT.replace("-1", "-2")), "the weights of all queries of a key add up to 1"),
        Wrong(attend(_SCORES, _HIDE, _OUT.replace("-1", "1")), "not found: the weights"),
        Wrong(attend(_SCORES, _HIDE, _OUT.replace("-1", "0")), "not found: the weights"),
        Wrong(attend(_SCORES, _OUT), "the mask is not used"),
        Wrong(attend(_SCORES, _HIDE.replace("(mask", "(~mask"), _OUT), "Yours looks just there"),
        Wrong(attend(_SCORES, "scores = scores + mask * float('-inf')", _OUT), "100% NaN; your line 4 is the first"),
        Wrong(attend(_SCORES, "scores = scores * ~mask", _OUT), "key 6 count 0.097 times (right: 0)"),
        Wrong(attend(_SCORES, "return torch.softmax(scores, -1).masked_fill(mask, 0) @ v"), "after the softmax"),
        Wrong(attend(_SCORES, _HIDE, "out = torch.softmax(scores, dim=-1) @ v", "return out.transpose(1, 2)"),
              "(yours is [batch, queries, heads, head_dim])"),
        Wrong(attend(_SCORES, _HIDE, _OUT.replace("(scores", "(scores[:1]").replace("@ v", "@ v[:1]")),
              "4, 9]; [batch, heads, queries, head_dim] = [2, 6, 4, 9] must come back"),
        Wrong(attend(_SCORES.replace("q @", "q.double() @").replace("k.t", "k.double().t"), _HIDE,
                     _OUT.replace("@ v", "@ v.double()")), "torch.float64; torch.float32 must come back"),
        Wrong(attend("q *= scaling", _SCORES.replace(" * scaling", ""), _HIDE, _OUT), "it changes its argument q"),
        Wrong(attend(_SCORES.replace("transpose(2, 3)", "T"), _HIDE, _OUT), "RuntimeError"),
        Wrong(attend(_SCORES, _HIDE, _OUT.replace("return ", "")), "nothing (is a return missing?)"),
        Right(attend("b, h, n, d = q.shape", "q = q.view(b, k.shape[1], -1, n, d)",
                     "k, v = k[:, :, None], v[:, :, None]",
                     "scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(mask[:, :, None], float('-inf'))",
                     "weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)",
                     "return (weights @ v).view(b, h, n, d)", copies="pass")),
        Right(attend("return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask, scale=scaling)")),
        Right(attend(_SCORES, _HIDE, _OUT)),
    ],
    "MyCache": [
        Wrong(cache(["return k, v"]), "layer 0: for k only what is new comes back: where are the earlier ones?"),
        Wrong(cache(["pass"]), "a return missing?); the pair k, v of all tokens so far must come back"),
        Wrong(cache([*_JOIN[:3], "return self.k[layer]"]), "the pair k, v of all tokens so far"),
        Wrong(cache([line.replace(".clone()", "") for line in _JOIN]),
              "the memory from which they were cut is used again"),
        Wrong(cache([line.replace("old_k, k]", "k, old_k]").replace("old_v, v]", "v, old_v]") for line in _JOIN]),
              "has what belongs to token 4; token 1 has what belongs to token 0; token 2 has wh"),
        Wrong(cache([line.replace("])", "], 1)") for line in _JOIN]),
              "RuntimeError: Sizes of tensors must match"),
        Wrong(cache([*_JOIN[:3], "return self.v[layer], self.k[layer]"]), "for k comes what was given for v"),
        Wrong(cache([line.replace("[layer]", "[0]") for line in _JOIN]),
              "append to layer 1: for k comes [8, 2, 5]; [tokens so far, kv_heads"),
        Wrong(cache([*_JOIN[:3], "group = 4", "return tuple(x.repeat_interleave(group, 1) for x in (self.k[layer], "
                     "self.v[layer]))"]), "[4, 8, 5]; [tokens so far, kv_heads, head_dim]"),
        Wrong(cache(_JOIN, init="pass", head="class MyCache:\n    k, v = [None] * 9, [None] * 9"),
              "a second MyCache gives out the tokens of the first"),
        Wrong("OLD = {}\n" + cache(["old = OLD.get((id(self), layer), (k[:0], v[:0]))",
                                   "OLD[id(self), layer] = torch.cat([old[0], k]), torch.cat([old[1], v])",
                                   "return OLD[id(self), layer]"]),
              "where is the rest? Outside of self"),
        Wrong(cache([*_JOIN[:3], "self.all.append(self.k[layer])", "self.all.append(self.v[layer])", _JOIN[3]],
                    init="self.k, self.v, self.all = [None] * num_layers, [None] * num_layers, []"),
              "it holds 3,840 bytes; 2 · 3 layers · 7 tokens · 2 heads · 5 · 4 bytes = 1,680 are needed"),
        Wrong(cache([*_JOIN[:3], "self.more = torch.zeros(100)", _JOIN[3]]), "what else is kept?"),
        Wrong(cache([line.replace("k.clone()", "k.half()").replace("v.clone()", "v.half()") for line in _JOIN]),
              "to layer 0: for k comes torch.float16; torch.float32 must come back"),
        Wrong(cache(["k, v = k.half(), v.half()", *_JOIN[:3], "return self.k[layer].float(), self.v[layer].float()"]),
              "has lost digits: in which dtype is it computed, or kept?"),
        Wrong("class MyCache:\n    def __init__(self, num_layers): pass", "MyCache has no append"),
        Wrong("class MyCache:\n    def append(self, layer, k, v): return k, v", "it must take (num_layers)"),
        Wrong(cache(["self.k[layer] = torch.cat([self.k[layer], k])", "return self.k[layer], v"]),
              "TypeError: expected Tensor as element 0 in argument 0, but got NoneType"),
        Wrong(cache(["k *= 1.5", *_JOIN]), "layer 0: it changes the k or v that it is given; they are still needed"),
        Wrong(cache(["yield k, v"]), "with yield, a call gives a generator"),
        Wrong(cache(["return self.append(layer, k, v)"]), "RecursionError"),
        Wrong(cache(["raise SystemExit(3)"]), "SystemExit: 3"),
        Wrong(cache(["return k.numpy(), v.numpy()"]),
              "a tensor [tokens so far, kv_heads, head_dim] = [4, 2, 5] must come back"),
        Right(cache(["self.k[layer].append(k.clone())", "self.v[layer].append(v.clone())",
                     "return torch.cat(self.k[layer]), torch.cat(self.v[layer])"],
                    init="self.k, self.v = ([[] for _ in range(num_layers)] for _ in range(2))")),
        Right(cache(["for name, new in (('k', k), ('v', v)):",
                     "    old = self.held.get((name, layer), new[:0])",
                     "    self.held[name, layer] = torch.cat([old, new])",
                     "return self.held['k', layer], self.held['v', layer]"], init="self.held = {}")),
    ],
    "my_mask": [
        Wrong(mask("return torch.zeros(len(positions), 1, positions.shape[1], keys, dtype=torch.bool)"),
              "0 to 3; yours looks at [0, 1, 2, 3, 4, 5]"),
        Wrong(mask("n = positions.shape[1]; return torch.ones(n, n, dtype=torch.bool).triu(1)"), "it returns [3, 3]"),
        Wrong(mask("b, n = positions.shape; return torch.ones(b, 1, n, n, dtype=torch.bool).triu(1)"),
              "it returns [1, 1, 3, 3]; [batch, 1, queries, keys] = [1, 1, 3, 6]"),
        Wrong(mask("b, n = positions.shape; return torch.ones(b, 1, n, keys, dtype=torch.bool).triu(1)"),
              "yours looks at [0] On a prompt of 5 it is right"),
        Wrong(mask("return (torch.arange(keys) <= positions[..., None])[:, None]"), "0 to 3; yours looks at [4, 5]"),
        Wrong(mask("return (torch.arange(keys) >= positions[..., None])[:, None]"), "0 to 3; yours looks at [0, 1, 2]"),
        Wrong(mask("return (torch.arange(keys) > positions[..., None] + 1)[:, None]"), "looks at [0, 1, 2, 3, 4]"),
        Wrong(mask("return (torch.arange(keys) > positions[:1, :, None])[:, None].expand(len(positions), -1, -1, -1)"),
              "the query at position 4 of sequence 1 may look at keys 0 to 4; yours looks at [0, 1]"),
        Wrong(mask("return (torch.arange(keys) > positions[..., None])"), "it returns [1, 3, 6]"),
        Wrong(mask("return (torch.arange(keys) > positions[..., None])[:, None].float()"),
              "torch.float32; torch.bool must come back"),
        Wrong(mask("return torch.ones(len(positions), 1, positions.shape[1], keys, dtype=torch.bool)"),
              "the query at position 3 may look at keys 0 to 3; yours looks at none"),
        Wrong(mask("return (torch.arange(keys) < positions[..., None])[:, None]"), "0 to 3; yours looks at [3, 4, 5]"),
        Wrong(mask("m = (torch.arange(keys) > positions[..., None])[:, None]; m[..., 0] = True; return m"),
              "0 to 3; yours looks at [1, 2, 3]"),
        Wrong(mask("return (torch.arange(keys) > position)[:, None]"), "NameError: name 'position' is not defined"),
        Wrong(mask("(torch.arange(keys) > positions[..., None])[:, None]"), "nothing (is a return missing?)"),
        Right(mask("return ~(torch.arange(keys)[None, None, None] <= positions[:, None, :, None])")),
        Right("""
              def my_mask(positions, keys):
                  rows = [[[[key > position for key in range(keys)] for position in row]] for row in positions.tolist()]
                  return torch.tensor(rows)
              """),
    ],
}
