"""Notebook 02: which rows a rank keeps, who owns which heads, column, row and one sum."""

from helpers.answers import Right, Wrong

_CUT = "def my_column_shard(source, rows): return "
_LINEARS = """
def my_linears(x, up, down, bias):
    size, inner = world_size(), len(up)
    start, stop = rank() * inner // size, (rank() + 1) * inner // size
"""
_MERGED = "def my_merged(sources, ranges): return "


def _heads(q: str, kv: str) -> str:
    """An answer that gives rank r these two ranges; H, K, T: query heads, KV heads, ranks."""
    return ("def my_heads(num_heads, num_kv_heads, tensor_parallel_size):\n"
            "    H, K, T = num_heads, num_kv_heads, tensor_parallel_size\n"
            f"    return [({q}, {kv}) for r in range(T)]\n")


_EVEN_Q = "range(r * H // T, (r + 1) * H // T)"
_READ = "range(r * H // T * K // H, ((r + 1) * H // T - 1) * K // H + 1)"

ANSWERS = {
    "my_column_shard": [
        Wrong(_CUT + "source[0:len(rows)]",
              "its own these are the first rows; where do the rows of this rank begin?"),
        Wrong(_CUT + "source[:, rows.start:rows.stop]",
              "0–2 are its own. A weight is [out, in]: which of the two is cut here?"),
        Wrong("""
              def my_column_shard(source, rows):
                  if len(source.shape) == 1:
                      return source[rows.start:rows.stop]
                  weight = source[:].reshape(source.shape[1], source.shape[0])
                  return weight[:, rows.start:rows.stop].T
              """, "row 0 of yours has numbers of rows 0–11"),
        Wrong(_CUT + "source[:][rows.start:rows.stop]",
              "read for 168 that are kept, 4.0 times as many: slice the source itself"),
        Wrong(_CUT + "source[rows]", "source is read by slices a:b without a step, not by range("),
        Wrong(_CUT + "source.narrow(0, rows.start, len(rows))", "and no .narrow: nothing of it is read yet\n"
              "         at your line 1"),
        Wrong(_CUT + "source[rows.start:rows.stop, :]", "source has 1 dimension, 2 slices were asked for"),
        Wrong(_CUT + "source[rows.start:rows.stop].half()", "torch.float16 comes back; torch.float32 must"),
        Wrong("def my_column_shard(source, rows): source[rows.start:rows.stop]", "nothing (is a return missing?)"),
        Wrong(_CUT + "source[rows.start:rows.stop].flip(0)",
              "rows 2, 1, 0 come back where rows 0–2 are its own the right ones, in another order"),
        Wrong("""
              def my_column_shard(source, rows):
                  return source[rows.start:rows.stop] if source.shape[0] < 15 else source[0:len(rows)]
              """, "on rank 1 differ", sizes=(2, 3)),
        Right("def my_column_shard(source, rows): return source[slice(rows.start, rows.start + len(rows))]"),
        Right("def my_column_shard(source, rows): return torch.cat([source[row:row + 1] for row in rows])"),
    ],
    "my_heads": [
        Wrong(_heads("range(r * (H // T), (r + 1) * (H // T))", "[r * (H // T) * K // H]"),
              "9 query and 3 KV heads over 2 ranks: query heads [8] on no rank: rank 0 has 0–3, rank 1 has 4–7"),
        Wrong(_heads(_EVEN_Q, "[r % K]"), "rank 1 holds KV heads [1], and its query heads, 2 to 3, read [0]"),
        Wrong(_heads(_EVEN_Q, "range(r * K // T, (r + 1) * K // T)"),
              "8 query and 2 KV heads over 4 ranks: rank 0 holds KV heads [], and its query heads, 0 to 1, read [0]"),
        Wrong(_heads(_EVEN_Q, "[r * K / T]"), "a head is whole"),
        Wrong(_heads("range(H) if not r else []", "range(K)"), "rank 1 without a query head"),
        Wrong(_heads("range((T - 1 - r) * H // T, (T - r) * H // T)", "range(K)"), "joined in the order of the ranks"),
        Wrong(_heads(_EVEN_Q, f"[*{_READ}][::-1]"), "holds KV heads [1, 0], and its query heads, 0 to 3, read [0–1]"),
        Wrong("def my_heads(num_heads, num_kv_heads, ranks): return [range(num_heads // ranks)] * ranks",
              "the entry of rank 0 is range(0, 4); it must be a pair"),
        Wrong(_heads(_EVEN_Q, "[r]"),
              "rank 2 holds KV head 2, and they are 0 to 1: which ones do its query heads read?"),
        Wrong(_heads(_EVEN_Q, "range(K)"), "rank 0 holds KV heads [0–1], and its query heads, 0 to 3, read [0]"),
        Wrong(_heads("range(r, H, T)", "range(K)"), "rank 0 has query heads [0, 2, 4, 6]; a rank keeps one slice"),
        Wrong(_heads("range(H)", "range(K)"), "query head 0 is on every rank; each is computed once"),
        Wrong(_heads("H // T", "max(1, K // T)"), "which heads, not how many"),
        Wrong(_heads("range(H // T)", "range(max(1, K // T))"),
              "query heads [4–7] on no rank: rank 0 has 0–3, rank 1 has 0–3"),
        Wrong("""
              def my_heads(num_heads, num_kv_heads, tensor_parallel_size):
                  assert num_heads % tensor_parallel_size == 0, "heads must divide"
                  here = num_heads // tensor_parallel_size
                  group = num_heads // num_kv_heads
                  return [(range(r * here, (r + 1) * here),
                           range(r * here // group, ((r + 1) * here - 1) // group + 1))
                          for r in range(tensor_parallel_size)]
              """, "AssertionError: heads must divide\n         at your line 2: assert num_heads"),
        Wrong("def my_heads(num_heads, num_kv_heads, tensor_parallel_size): return [range(num_heads)]",
              "it returns a list of 1; (query heads, KV heads) for each rank"),
        Wrong("def my_heads(num_heads, num_kv_heads, tensor_parallel_size): pass", "nothing (is a return missing?)"),
        Wrong("""
              def my_heads(num_heads, num_kv_heads, tensor_parallel_size):
                  group = num_heads // num_kv_heads
                  ends = [*range(tensor_parallel_size), num_heads]
                  return [(range(a, b), range(a // group, (b - 1) // group + 1)) for a, b in zip(ends, ends[1:])]
              """, "ll of them wait for the one with 7. Can they be dealt out more evenly?"),
        Right(_heads(_EVEN_Q, _READ)),
        Right(_heads(f"list({_EVEN_Q})", f"list({_READ})")),
    ],
    "my_linears": [
        Wrong(_LINEARS + "    return all_reduce(x @ up[start:stop].T @ down[:, start:stop].T + bias)",
              "the bias counts 2 times (right: 1)"),
        Wrong(_LINEARS + "    return all_reduce(x @ up[start:stop].T @ down[:, start:stop].T)",
              "the bias counts 0 times (right: 1)"),
        Wrong(_LINEARS + "    return x @ up[start:stop].T @ down[:, start:stop].T + bias",
              "each rank returns its own summand. Where are they added up?"),
        Wrong(_LINEARS + "    y = x @ up[start:stop].T @ down[:, start:stop].T\n    all_reduce(y.clone())\n"
              "    return y + bias", "urns its own summand. The log shows an all_reduce: is its result used?"),
        Wrong(_LINEARS + "    return all_reduce(x @ up[:, start:stop] @ down[:, start:stop].T) + bias",
              "it was called with x [5, 6], up [8, 6], down [6, 8]"),
        Wrong(_LINEARS + "    return x @ up.T @ down.T + bias",
              "the result is right, and the op log holds no collective. Has every rank computed everything?"),
        Wrong(_LINEARS + "    return all_reduce(x @ up.T @ down.T / size) + bias",
              "a rank multiplies 480 times where its share is 240"),
        Wrong(_LINEARS + "    y = all_gather(x @ up[start:stop].T)\n    return y @ down.T + bias",
              "the op log holds 1 × all_gather. One sum is enough"),
        Wrong(_LINEARS + "    y = all_reduce(x @ up[start:stop].T @ down[:, start:stop].T)\n"
              "    return y + bias if rank() == 0 else y", "the bias counts 0 times (right: 1)"),
        Wrong(_LINEARS + "    return all_reduce(x @ up[start:stop] @ down[:, start:stop].T) + bias",
              "mat1 and mat2 shapes cannot be multiplied"),
        Wrong(_LINEARS + "    y = x @ up[start:stop].T @ down[:, start:stop].T\n"
              "    return (all_reduce(y) if rank() == 0 else y) + bias", "rank 0 waits in all_reduce"),
        Wrong(_LINEARS + "    x *= 2\n    return all_reduce(x @ up[start:stop].T @ down[:, start:stop].T / 2) + bias",
              "it changes its argument x"),
        Wrong(_LINEARS + "    all_reduce(x @ up[start:stop].T @ down[:, start:stop].T)", "is a return missing?"),
        Right(_LINEARS + "    return all_reduce(x @ up[start:stop].T @ down[:, start:stop].T) + bias"),
        Right("""
              def my_linears(x, up, down, bias):
                  mine = torch.arange(len(up)).tensor_split(world_size())[rank()]
                  y = F.linear(F.linear(x, up[mine]), down[:, mine], bias if rank() == 0 else None)
                  return all_reduce(y)
              """),
    ],
    "my_merged": [
        Wrong("""
              def my_merged(sources, ranges):
                  fused = torch.cat([source[:] for source in sources])
                  start = rank() * len(fused) // world_size()
                  return fused[start:start + sum(map(len, ranges))]
              """, "in q|k|v, k begins at row 16 and v begins at row 20"),
        Wrong(_MERGED + "torch.cat([source[0:len(rows)] for source, rows in zip(sources, ranges)])",
              "[q 0–7|k 0–1|v 0–1] come back where [q 8–15|k 2–3|v 2–3] are its own"),
        Wrong("""
              def my_merged(sources, ranges):
                  parts = [source[rows.start:rows.stop] for source, rows in zip(sources, ranges)]
                  return torch.cat([parts[0], *parts[:0:-1]])
              """, "[q 0–7|v 0–1|k 0–1] come back where [q 0–7|k 0–1|v 0–1] are its own"),
        Wrong(_MERGED + "torch.cat([source[rows.start:rows.stop] for source, rows in zip(sources, ranges)], dim=1)",
              "at your line 1"),
        Wrong("""
              def my_merged(sources, ranges):
                  q, k, v = sources
                  return torch.cat([part[rows.start:rows.stop] for part, rows in zip((q, k, v), ranges)])
              """, "ValueError: not enough values to unpack"),
        Wrong(_MERGED + "[source[rows.start:rows.stop] for source, rows in zip(sources, ranges)]",
              "2 ranks, rank 0: it returns a list of 3; a tensor [12, 6] must come back"),
        Wrong(_MERGED + "torch.cat([source[:][rows.start:rows.stop] for source, rows in zip(sources, ranges)])",
              "read for 288 that are kept, 2.0 times as many: slice the source itself"),
        Wrong("""
              def my_merged(sources, ranges):
                  rows = ranges[0]
                  return torch.cat([source[rows.start * source.shape[0] // 16:rows.stop * source.shape[0] // 16]
                                    for source in sources])
              """, "IndexError: source[13:20] along dim 0 is outside 0:18"),
        Wrong("""
              def my_merged(sources, ranges):
                  fused = torch.cat([source[:] for source in sources])
                  return torch.cat([fused[rows.start:rows.stop] for rows in ranges])
              """, "a range counts the rows of its own source, and here all of them are taken from q|k|v as one"),
        Wrong("""
              def my_merged(sources, ranges):
                  parts = [source[rows.start:rows.stop] for source, rows in zip(sources, ranges)]
                  return torch.cat(parts if sources[0].shape[0] < 20 else parts[::-1])
              """, "in the engine, "),
        Right(_MERGED + "torch.cat([source[rows.start:rows.stop] for source, rows in zip(sources, ranges)])"),
    ],
}
