"""Notebook 07: sending, and comparing the ranks."""

from helpers.answers import Right, Wrong

SEND = '''
def my_send_shards(source, ranges):
    for owner, rows in enumerate(ranges):
        part = torch.empty(len(rows), *source.shape[1:], dtype=source.dtype)
        if rank() == 0:
            part = source[rows.start:rows.stop]
        broadcast(part)
        if owner == rank():
            mine = part
    return mine
'''


def send(old: str, new: str) -> str:
    """The right answer with one thing changed."""
    assert old in SEND
    return SEND.replace(old, new)


ANSWERS = {
    "my_send_shards": [
        Wrong("""
              def my_send_shards(source, ranges):
                  return source[ranges[rank()].start:ranges[rank()].stop]
              """, "rank 1 reads 72 bytes itself; only rank 0 has the files"),
        Wrong("""
              def my_send_shards(source, ranges):
                  whole = source[:] if rank() == 0 else torch.empty(source.shape, dtype=source.dtype)
                  broadcast(whole)
                  return whole[ranges[rank()].start:ranges[rank()].stop]
              """, "a message of 88 bytes, and the largest slice has 72"),
        Wrong("""
              def my_send_shards(source, ranges):
                  whole = source[:] if rank() == 0 else torch.empty(source.shape, dtype=source.dtype)
                  return broadcast(whole)
              """, "rows 0–10 come back where rows 0–1 are its own\n         all of it"),
        Wrong("""
              def my_send_shards(source, ranges):
                  here = ranges[rank()]
                  part = torch.empty(len(here), *source.shape[1:], dtype=source.dtype)
                  if rank() == 0:
                      part = source[here.start:here.stop]
                  return broadcast(part)
              """, "the ranks meet in different collectives"),
        Wrong("""
              def my_send_shards(source, ranges):
                  for owner, rows in enumerate(ranges):
                      part = torch.zeros(len(rows), *source.shape[1:], dtype=source.dtype)
                      if rank() == 0:
                          part = source[rows.start:rows.stop]
                      broadcast(part, src=owner)
                      if owner == rank():
                          mine = part
                  return mine
              """, "rank 1 is asked to send (src=1), and only rank 0 has the rows"),
        Wrong("""
              def my_send_shards(source, ranges):
                  if rank() == 0:
                      for rows in ranges:
                          broadcast(source[rows.start:rows.stop])
                  return torch.empty(len(ranges[rank()]), *source.shape[1:], dtype=source.dtype)
              """, "Every rank takes part in every broadcast"),
        Wrong(send(", dtype=source.dtype", ""), "rank 1 calls broadcast [2, 4] float32 src 0"),
        Wrong(send("    return mine\n", ""),
              "returns nothing (is a return missing?); a tensor [2, 4] must come back"),
        Wrong(send("return mine", "return mine.double()"),
              "rank 0: a tensor of torch.float64 comes back; torch.bfloat16 must"),
        Wrong("""
              def my_send_shards(source, ranges):
                  for row in range(source.shape[0]):
                      part = torch.empty(1, *source.shape[1:], dtype=source.dtype)
                      if rank() == 0:
                          part = source[row:row + 1]
                      broadcast(part)
                      if row in ranges[rank()]:
                          kept = part if row == ranges[rank()].start else torch.cat([kept, part])
                  return kept
              """, "ranges [range(0, 4), range(4, 4), range(4, 9)]: on rank 1: UnboundLocalError"),
        Wrong(send("source[rows.start:rows.stop]", "source[:][rows.start:rows.stop].clone()"),
              "read for 88 that are kept, 2.0 times as many: no slice is needed twice"),
        Wrong("""
              def my_send_shards(source, ranges):
                  part = torch.empty(len(ranges[0]), *source.shape[1:], dtype=source.dtype)
                  for owner, rows in enumerate(ranges):
                      if rank() == 0:
                          part = source[rows.start:rows.stop]
                      part = part[:len(rows)]
                      broadcast(part)
                      if owner == rank():
                          mine = part
                  return mine.mine
              """, "rank 1 calls broadcast [2, 4] bfloat16 src 0"),
        Wrong("""
              def my_send_shards(source, ranges):
                  whole = source[:] if rank() == 0 else None
                  for owner, rows in enumerate(ranges):
                      part = torch.zeros(len(rows), *source.shape[1:], dtype=source.dtype)
                      if rank() == 0:
                          part += whole[rows.start:rows.stop]
                      all_reduce(part)
                      if owner == rank():
                          mine = part
                  return mine
              """, "range(12, 15)]: the messages are right, but rank 0 has 60 of the tensor's 60 bytes"),
    ],
    "my_spread": [
        Wrong("def my_spread(x): return 0.0", "says 0 without a word to the others; how could it know?"),
        Wrong("""
              def my_spread(x):
                  highest = all_gather(x.max()[None])
                  return (highest.max() - highest.min()).item()
              """, "None of your lines makes the numbers of all ranks"),
        Wrong("""
              def my_spread(x):
                  versions = all_gather(x[None], dim=0)
                  return (versions - versions[0]).abs().max().item()
              """, "not found: their maxima"),
        Wrong("""
              def my_spread(x):
                  before = x
                  all_reduce(x)
                  return (x / world_size() - before).abs().max().item()
              """, "it changes its argument x"),
        Wrong("""
              def my_spread(x):
                  if rank() == 0:
                      versions = all_gather(x[None], dim=0)
                      return (versions.amax(0) - versions.amin(0)).max().item()
              """, "Here both hold the same: every rank comes"),
        Wrong("""
              def my_spread(x):
                  versions = all_gather(x[None], dim=0)
                  if rank() == 0:
                      return (versions.amax(0) - versions.amin(0)).max().item()
              """, "on rank 1 it returns nothing (is a return missing?)"),
        Right("""
              def my_spread(x):
                  versions = all_gather(x[None], dim=0)
                  return max((a - b).abs().max().item() for a in versions for b in versions)
              """),
        Wrong("def my_spread(x): return all_gather(x, rank())", "the ranks meet in different collectives"),
        Right("""
              def my_spread(x):
                  largest = torch.zeros(1)
                  for src in range(world_size()):
                      other = broadcast(x.clone(), src)
                      largest = torch.maximum(largest, (other - x).abs().max())
                  return all_gather(largest).max()
              """),
    ],
}
