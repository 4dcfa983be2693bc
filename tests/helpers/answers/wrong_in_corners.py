"""Answers that are right but in one corner: another dtype, one query, one token, uneven ranges, no biases."""

from helpers.answers import Wrong
from helpers.answers.nb09 import but
from helpers.notebooks import solutions

from course import lesson

_SOLVED = solutions(lesson.all_exercises())


def _changed(name: str, old: str, new: str, words: str) -> Wrong:
    return Wrong(but(_SOLVED[name], old, new), words)


ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask):\n    if scores.shape[2] == 1: return scores\n"
              "    return scores.masked_fill(mask, float('-inf'))", "for a single query, 2 of 2 hidden keys can still"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask, -1e4 * scores.abs().max())",
              "in bfloat16, 6 of 6 hidden keys can still be seen: yours makes their scores -2e+03")],
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name):\n    lost = tensor.isnan().double().mean()\n"
              "    assert lost == 0, f'NaN in weights: {lost:.0%} of {list(tensor.shape)}'",
              "Its name, 'scores', is missing"),
        Wrong("def my_assert_no_nan(tensor, name):\n    lost = tensor.isnan().double().mean()\n"
              "    assert lost < 5e-4, f'NaN in {name}: {lost:.0%} of {list(tensor.shape)}'", "Now 1 of 36000 is")],
    "my_linears": [
        Wrong("def my_linears(x, up, down, bias):\n    parts = torch.tensor_split(torch.arange(len(x)), world_size())\n"
              "    y = torch.zeros(len(x), len(down), dtype=x.dtype)\n    mine = parts[rank()]\n"
              "    y[mine] = x[mine] @ up.T @ down.T\n    return all_reduce(y) + bias",
              "a rank multiplies 110 times where its share is 40"),
        _changed("my_linears", "all_reduce(summand)", "all_reduce(summand.float()).to(x.dtype)",
                 "What is off by so little has lost digits"),
        Wrong("def my_linears(x, up, down, bias):\n    mine = torch.arange(rank(), len(up), world_size())\n"
              "    y = x @ up[mine].T @ down[:, mine].T\n    return all_reduce(y + bias * (rank() < 2))",
              "In yours, the bias counts 2 times (right: 1)")],
    "my_column_shard": [
        Wrong("def my_column_shard(source, rows):\n    base, rest = divmod(source.shape[0], world_size())\n"
              "    first = rank() * base + min(rank(), rest)\n    return source[first:first + base + (rank() < rest)]",
              "rows 0–5 come back where rows 0–2 are its own Your code never reads rows")],
    "my_rope": [
        _changed("my_rope", "positions[:, None].float() * speeds",
                 "(torch.arange(4096).float()[:, None] * speeds)[positions]", "index 40001 is out of bounds"),
        _changed("my_rope", "theta ** (", "torch.tensor(theta, dtype=x.dtype).float() ** (",
                 "is turned by other angles than float32 gives")],
    "my_apply_rope": [
        Wrong("def my_apply_rope(self, q, k, cos, sin):\n    self.rotate(q.transpose(0, 1)[None], k.transpose(0, 1)"
              "[None], cos, sin)\n    def turn(x):\n        a, b = x.chunk(2, -1)\n"
              "        return x * cos[0][:, None] + torch.cat([-b, a], -1) * sin[0][:, None]\n"
              "    return turn(q), turn(k)", "is not doubled: are its results used?")],
    "my_positions": [
        Wrong("def my_positions(starts, counts): return torch.cat([torch.arange(s, s + c) for s, c in "
              "dict(zip(starts, counts)).items()])", "yours are [3, 0, 1, 2, 3, 5, 6], and [3, 4, 5, 6, 7, 0, 1")],
    "my_attend": [
        _changed("my_attend", "    scores = scores.masked_fill", "    if q.shape[2] > 1: scores = scores.masked_fill",
                 "3 query heads each, 1 queries, 6 keys: the mask is not used: tokens see the future")],
    "my_mask": [
        Wrong("def my_mask(positions, keys):\n    rows = positions[:, :1] + torch.arange(positions.shape[1])\n"
              "    return (torch.arange(keys) > rows[..., None])[:, None]", "the query at position 3 of sequence 0")],
    "MyCache": [
        _changed("MyCache", "[None] * num_layers, [None] * num_layers", "2 * [num_layers * [torch.zeros(0, 1, 1)]]",
                 "Sizes of tensors must match"),
        _changed("MyCache", "torch.cat([old_k, k]), torch.cat([old_v, v])",
                 "torch.cat([old_k, k]).float(), torch.cat([old_v, v]).float()", "torch.bfloat16 must come back")],
    "my_write_read": [_changed("my_write_read", "return flat[slots]", "return flat[slots].float()",
                               "it returns torch.float32; torch.bfloat16 must come back")],
    "my_key": [
        Wrong("def my_key(parent, ids): return str(parent)[:20] + str(ids)", "is all of the parent in the key?"),
        Wrong("def my_key(parent, ids): return parent, *ids[:-1], ids[-1] // 2", "of 3 blocks two get the same key")],
    "my_generate": [
        _changed("my_generate", "for position in range(len(ids), len(ids) + count - 1):",
                 "for position in range(len(ids), len(ids) + max(count - 1, 1)):", "2, 1 new: 2 ids came back; 1")],
    "my_embedding": [
        Wrong("def my_embedding(ids, weight_here, rows):\n    out = torch.zeros(len(ids), weight_here.shape[1]).to("
              "weight_here)\n    for word, at in {word: at for at, word in enumerate(ids.tolist())}.items():\n"
              "        if word in rows:\n            out[at] = weight_here[word - rows.start]\n"
              "    return all_reduce(out)", "zeros: does its owner add its row to the sum?")],
    "my_head_logits": [
        _changed("my_head_logits", "hidden @ weight_here.T", "(hidden @ weight_here.T).squeeze(0)",
                 "where is the dimension of 1? A squeeze takes all of them")],
    "MyLayer": [
        _changed("MyLayer", "names if name in weights] or [torch.zeros(1)]", "names]", "self_attn.q_proj.bias"),
        _changed("MyLayer", "self.eps) * weight", "1e-6) * weight", "point 'input_norm', your line 36")],
    "my_row_shard": [
        _changed("my_row_shard", "columns.stop]", "columns.stop].float()", "torch.float32 comes back; torch.float16")],
    "MyRows": [_changed("MyRows", "first:self.start + last]", "first:self.start + last, :]", "has 1 dimension, 2")],
    "my_load": [_changed("my_load", 'layer, kind = name.split(".")[-2:]', 'layer, kind = name.split(".")[-2:]\n'
                         '            layer = layer.replace("_norm", "_proj")', "IndexError: model.layers.")],
}
