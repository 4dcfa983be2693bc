"""Notebook 07: reading what is kept."""

from helpers.answers import Right, Wrong

LOAD = '''
def my_load(ckpt, plan, rank):
    here, d, kept = plan.ranks[rank], plan.head_dim, {}
    q, kv = (slice(heads.start * d, heads.stop * d) for heads in (here.q_heads, here.kv_heads))
    mlp, vocab = slice(here.mlp.start, here.mlp.stop), slice(here.vocab.start, here.vocab.stop)
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": mlp, "up_proj": mlp, "embed_tokens": vocab,
            "lm_head": vocab}
    columns = {"o_proj": q, "down_proj": mlp}
    with ckpt.reader() as files:
        for name in ckpt.tensors:
            layer, kind = name.split(".")[-2:]
            if layer in rows:
                kept[name] = files[name][rows[layer]]
            elif layer in columns and kind == "weight":
                kept[name] = files[name][:, columns[layer]]
            else:
                kept[name] = files[name][:]
    return kept
'''


def load(old: str, new: str) -> str:
    """The right answer with one thing changed."""
    assert old in LOAD
    return LOAD.replace(old, new)


ANSWERS = {
    "my_row_shard": [
        Wrong("def my_row_shard(source, columns): return source[:][:, columns.start:columns.stop]",
              "180 bytes were read for 40 that are kept, 4.5 times as many: which pair of brackets reads the file?"),
        Wrong("def my_row_shard(source, columns): return source[columns.start:columns.stop]",
              "on rank 1: IndexError: source[2:9] along dim 0 is outside 0:5"),
        Wrong("def my_row_shard(source, columns): return source[:, columns.start:columns.stop - 1]",
              "columns 0 come back where columns 0–1 are its own"),
        Wrong("def my_row_shard(source, columns): return source[:, columns.start:columns.stop].T",
              "9]: [2, 5] comes back; [5, 2] must: these are the right numbers, in another shape"),
        Wrong("def my_row_shard(source, columns): return source[:, list(columns)]", "is read by slices a:b"),
        Wrong("def my_row_shard(source, columns): return source[:, columns]", "is read by slices a:b"),
        Wrong("def my_row_shard(source, columns): return source",
              "[5, 2] must come back (nothing of it is read: is a slice missing?)"),
        Wrong("def my_row_shard(source, columns): source[:, columns.start:columns.stop]", "is a return missing?"),
        Wrong("def my_row_shard(source, columns): return source[:, columns.start:columns.stop].double()",
              "weight [5, 9]: a tensor of torch.float64 comes back; torch.float32 must"),
        Wrong("""
              def my_row_shard(source, columns):
                  if source.shape[0] > 5:
                      return source[:, :len(columns)] + 1
                  return source[:, columns.start:columns.stop]
              """, "in the engine: "),
        Right("""
              def my_row_shard(source, columns):
                  part = slice(columns.start, columns.stop)
                  return source[:, part].contiguous()
              """),
    ],
    "MyRows": [
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.shape = shape
                      self.data = source[start:start + shape[0]]

                  def __getitem__(self, rows):
                      return self.data[rows]
              """, "making it reads 140 bytes already: nothing is to be read before it is sliced"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.shape = source, start, shape

                  def __getitem__(self, rows):
                      return self.source[rows.start:rows.stop]
              """, "rows 4–10 of a source of 16: rows 2–4 come back where rows 6–8 are meant"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.shape = source, start, shape

                  def __getitem__(self, rows):
                      return self.source[self.start + rows.start:self.start + rows.stop]
              """, "for +: 'int' and 'NoneType'\n         at your line 6: return self.source"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.shape = source, start, shape

                  def __getitem__(self, rows):
                      return self.source[:][self.start:self.start + self.shape[0]][rows]
              """, "320 bytes were read for 60 that are kept"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.shape = source, start, shape

                  def __getitem__(self, rows):
                      first, last = rows.start or 0, self.shape[0] if rows.stop is None else rows.stop
                      return self.source[self.start + first:self.start + last]
              """, "rows 9–12 come back where rows 9–10 are meant, as of a list"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.rows = source, start, shape

                  def __getitem__(self, rows):
                      first, last, _ = rows.indices(self.rows[0])
                      return self.source[self.start + first:self.start + last]
              """, "it has no .shape"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.shape = source, start, source.shape

                  def __getitem__(self, rows):
                      first, last, _ = rows.indices(self.shape[0])
                      return self.source[self.start + first:self.start + last]
              """, "its .shape is [16, 5]; the part has 7 of the 16 rows, [7, 5]"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.shape = source, start, shape
              """, "it cannot be sliced: part[2:5] needs a method __getitem__(self, rows)"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.shape = source, start, shape

                  def __getitem__(self, rows):
                      first, last, _ = rows.indices(self.shape[0])
                      self.source[self.start + first:self.start + last]
              """, "returns nothing (is a return missing?); a tensor [3, 5] must come back"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, shape):
                      self.source, self.shape = source, shape
              """, "it must take (source, start, shape); yours takes (source, shape)"),
        Wrong("""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.rows = source, start, shape
                  def shape(self):
                      return self.rows
                  def __getitem__(self, rows):
                      return self.source[rows]
              """, "its .shape is the function shape itself; the part has 7 of the 16 rows"),
        *[Wrong(f"""
              class MyRows:
                  def __init__(self, source, start, shape):
                      self.source, self.start, self.shape = source, start, shape
                  {how} __getitem__(self, rows):
                      first, last, _ = rows.indices(self.shape[0])
                      {gives} self.source[self.start + first:self.start + last]{as_what}
              """, words) for how, gives, as_what, words in (
                  ("async def", "return", "", "with async def, a call gives a coroutine"),
                  ("def", "yield", "", "with yield, a call gives a generator"),
                  ("def", "return", ".numpy()", "it returns a numpy array [3, 5]"),
                  ("def", "return", ".double()", "torch.float64 comes back; torch.float32 must"),
                  ("def", "return", " / 0", "stand nowhere in the file"))],
        Right("""
              def MyRows(source, start, shape):
                  class Part:
                      def __getitem__(self, rows):
                          here = range(start, start + shape[0])[rows]
                          return source[here.start:here.stop]
                  part = Part()
                  part.shape = shape
                  return part
              """),
    ],
    "my_load": [
        Wrong("""
              def my_load(ckpt, plan, rank):
                  with ckpt.reader() as files:
                      return {name: files[name][:] for name in ckpt.tensors}
              """, "rows 0–42 come back where rows 22–42 are its tokens all of it"),
        Wrong("""
              def my_load(ckpt, plan, rank):
                  with ckpt.reader() as files:
                      return {name: files[name] for name in ckpt.tensors}
              """, "[21, 72] must come back (nothing of it is read: is a slice missing?)"),
        Wrong(load("return kept", "return kept | {'x': 1}"),
              "rank 1 of 2: no tensor of the checkpoint is called 'x'"),
        Wrong(load("return kept", "return {name: weight + weight.dim() - 1 for name, weight in kept.items()}"),
              "stand nowhere in the file"),
        Wrong(load("kv = (slice(heads.start * d, heads.stop * d) for heads in (here.q_heads, here.kv_heads))",
                   "kv = (slice(heads.start * d, heads.stop * d) for heads in (here.q_heads, here.q_heads))"),
              "it was called with ckpt (CountedCheckpoint), plan (ShardPlan), rank 1"),
        Wrong(load('"k_proj": kv', '"k_proj": slice(rank * d * plan.num_kv_heads // len(plan.ranks), '
                   '(rank + 1) * d * plan.num_kv_heads // len(plan.ranks))'),
                         "rows 9–17 come back where rows 12–17 are its KV heads"),
        Wrong(load('files[name][:, columns[layer]]', 'files[name][columns[layer]]'),
              "its MLP columns. A weight is [out, in]: which of the two is cut here?"),
        Wrong(load(' and kind == "weight"', ""), "has 1 dimension, 2 slices were asked for"),
        Wrong(load('elif layer in columns and kind == "weight"', 'elif layer in columns and kind == "bias":\n'
                   '                kept[name] = files[name][:5]\n            elif layer in columns'),
              "0–4 come back where rows 0–71 are its own: every rank keeps all of them"),
        Wrong(load("kept[name] = files[name][rows[layer]]", "kept[name] = files[name][:][rows[layer]]"),
              "12384 bytes were read for 6048 that are kept"),
        Wrong(load("kept[name] = files[name][rows[layer]]", "kept[name] = files[name][:][rows[layer]].clone()"),
              "read for 6048 that are kept, 2.0 times as many: slice the source itself"),
        Wrong(load("for name in ckpt.tensors:", "for name in list(ckpt.tensors)[:-3]:"), "3 of 33 tensors are missing"),
        Wrong(load("layer, kind = ", "if '.0.' not in name and 'layers' in name: continue\n            layer, kind = "),
              "tensors are missing, model.layers.1."),
        Wrong(load("return kept", "return list(kept.values())"), "it returns a list of 33"),
        Wrong(load("    return kept", ""), "nothing (is a return missing?)"),
        Wrong(load("kept[name] = files[name][:]\n", "kept[name] = files[name][:].double()\n"),
              "a tensor of torch.float64 comes back; torch.float32 must"),
        Wrong(load('"gate_proj": mlp', '"gate_proj": slice(rank * 6, rank * 6 + 6)'),
              "rows 6–11 come back where rows 13–24 are its MLP columns"),
        Right(load("return kept", "return {name: torch.nn.Parameter(tensor) for name, tensor in kept.items()}")),
    ],
}
