"""Notebook 05: slots, a cache in blocks, keys, a pool."""

from helpers.answers import Right, Wrong

ANSWERS = {
    "my_slot_mapping": [
        Wrong("def my_slot_mapping(t, positions, size): return [t[0] * size + p for p in positions]",
              "position 4 goes to slot 20, place 0 of block 5, and belongs to place 0 of block 1"),
        Wrong("def my_slot_mapping(t, positions, size): return [t[p % 3] * size + p % size for p in positions]",
              "position 1 goes to slot 5, place 1 of block 1, and belongs to place 1 of block 4"),
        Wrong("def my_slot_mapping(t, positions, size): return [t[p // size] * size + 3 for p in positions]",
              "place 3 of block 4, and belongs to place 0 of block 4"),
        Wrong("def my_slot_mapping(t, positions, size): return [t[p // size] * size for p in positions]",
              "slot 16, place 0 of block 4, and belongs to place 1 of block 4"),
        Wrong("""
              def my_slot_mapping(t, positions, size):
                  return [t[p // size] * size + p % size for p in range(len(positions))]
              """, "position 7 goes to slot 16, place 0 of block 4"),
        Wrong("def my_slot_mapping(t, positions, size): return [t[p // size] * size + p % size for p in positions][:1]",
              "for 10 positions come 1 slots"),
        Wrong("""
              def my_slot_mapping(t, positions, size):
                  return [t[p // size] * size + p % size - (len(positions) == 1) for p in positions]
              """, "slot 6, place 2 of block 1, and belongs to place 3 of block 1"),
        Wrong("def my_slot_mapping(t, positions, size): return [t[p // 4] * 4 + p % 4 for p in positions]",
              "On blocks of 4 it is right"),
        Wrong("""
              def my_slot_mapping(t, positions, size):
                  t.sort()
                  return [t[p // size] * size + p % size for p in positions]
              """, "it changes its argument block_ids"),
        Wrong("def my_slot_mapping(t, positions, size): [t[p // size] * size + p % size for p in positions]",
              "nothing (is a return missing?)"),
        Wrong("""
              def my_slot_mapping(block_ids, positions, block_size):
                  for position in range(positions):
                      pass
              """, "at your line 2: for position in range(positions)"),
        Wrong("def my_slot_mapping(position): return position", "it must take (block_ids, positions, block_size)"),
        Wrong("""
              def my_slot_mapping(t, positions, size):
                  slots = [t[p // size] * size + p % size for p in positions]
                  return slots if t in ([4, 1, 3], [2, 5, 0, 7], [6, 0, 9]) else slots[::-1]
              """, "in the engine: "),
        Right("""
              def my_slot_mapping(t, positions, size):
                  places = [block * size + place for block in t for place in range(size)]
                  return places[positions.start:positions.stop]
              """),
    ],
    "my_write_read": [
        Wrong("def my_write_read(cache, block_ids, start, new): return new", "the cache is as it was before"),
        Wrong("def my_write_read(cache, block_ids, start, new): cache.unsqueeze_(0)", "goes in as [6, 4, 2, 3]"),
        Wrong("def my_write_read(cache, t, start, new):\n    for i, row in enumerate(new.flip(0), start):\n        "
              "cache[t[i // cache.shape[1]], i % cache.shape[1]] = row",
                    "and 4 new: place 0 of block 3, which is position 8's, holds position 5"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat = cache.flatten(0, 1)
                  first = block_ids[0] * cache.shape[1]
                  flat[first + start:first + start + len(new)] = new
                  return flat[first:first + start + len(new)]
              """, "which is in none of the sequence's blocks, holds position 5 now"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat, size = cache.flatten(0, 1), cache.shape[1]
                  slots = [block_ids[p // size] * size + p % size for p in range(start + len(new))]
                  flat[slots[:len(new)]] = new
                  return flat[slots]
              """, "which is position 0's, holds position 5 now: only the places of the new"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat, size = cache.flatten(0, 1), cache.shape[1]
                  slots = [block_ids[p // size] * size + p % size for p in range(start, start + len(new))]
                  flat[slots] = new
                  return cache[block_ids].flatten(0, 1)
              """, "it returns [12, 2, 3]; [tokens, kv heads, head_dim] = [9, 2, 3] must"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat, size = cache.flatten(0, 1), cache.shape[1]
                  slots = [block_ids[p // size] * size + p % size for p in range(start + len(new))]
                  flat[slots[start:]] = new
                  return new
              """, "it returns [4, 2, 3]; [tokens, kv heads, head_dim] = [9, 2, 3] must"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat, size = cache.flatten(0, 1), cache.shape[1]
                  slots = [block_ids[p // size] * size + p % size for p in range(start + len(new))]
                  found = flat[slots]
                  flat[slots[start:]] = new
                  return found
              """, "what comes back was read before the new tokens were written"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat, size = cache.flatten(0, 1), cache.shape[1]
                  slots = [block_ids[p // size] * size + p % size for p in range(start + len(new))]
                  flat[slots[start:]] = new
                  return flat[sorted(slots)]
              """, "row 4 must be position 4, at place 0 of block 4; yours is place 0 of block 3"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat = cache.flatten(0, 1)
                  slots = [block_ids[p // 4] * 4 + p % 4 for p in range(start + len(new))]
                  flat[slots[start:]] = new
                  return flat[slots]
              """, "On blocks of 4 it is right"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat, size = cache.flatten(0, 1), cache.shape[1]
                  slots = [block_ids[p // size] * size + p % size for p in range(start + len(new))]
                  flat[slots[start:]] = new
                  return flat[slots].transpose(0, 1)
              """, "(yours is [kv heads, tokens, head_dim])"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  slots = [block_ids[p // 4] * 4 + p % 4 for p in range(start + len(new))]
                  cache[slots[start:]] = new
                  return cache[slots]
              """, "at your line 3: cache[slots[start:]] = new"),
        Wrong("""
              def my_write_read(cache, block_ids, start, new):
                  flat, size = cache.flatten(0, 1), cache.shape[1]
                  slots = [block_ids[p // size] * size + p % size for p in range(start + len(new))]
                  flat[slots[start:]] = new
              """, "nothing (is a return missing?)"),
        Right("""
              def my_write_read(cache, block_ids, start, new):
                  size = cache.shape[1]
                  for i, row in enumerate(new):
                      cache[block_ids[(start + i) // size], (start + i) % size] = row
                  return torch.cat([cache[block] for block in block_ids])[:start + len(new)]
              """),
    ],
    "my_key": [
        Wrong("def my_key(parent, ids): return hash(tuple(ids))", "is all of the parent in the key?"),
        Wrong("def my_key(parent, ids): return hash((parent, ids[-1]))", "does it look at the first token?"),
        Wrong("def my_key(parent, ids): return hash((parent, ids[0]))", "does it look at the second token?"),
        Wrong("def my_key(parent, ids): return hash((parent, ids[0], ids[-1]))", "does it look at the second token?"),
        Wrong("def my_key(parent, ids): return hash((parent, sum(ids)))", "does the order of the tokens count?"),
        Wrong("def my_key(parent, ids): return hash((parent, ''.join(map(str, ids))))",
              "where does one number end?"),
        Wrong("def my_key(parent, ids): return hash((parent, tuple(ids[:4])))", "each of the 20 tokens?"),
        Wrong("def my_key(parent, ids): return hash((parent, *ids, *[0] * (9 - len(ids))))", "see the 0 at the end?"),
        Wrong("def my_key(parent, ids): return hash(parent) ^ hash(tuple(ids))", "the order of the blocks count?"),
        Wrong("def my_key(parent, ids): return parent + bytes(ids)", "bytes must be in range(0, 256)"),
        Wrong("def my_key(parent, ids): return bytes(i % 256 for i in ids) + parent", "token ids 256 apart are"),
        Wrong("def my_key(parent, ids): return [parent, *ids]", "cannot be looked up in a dict"),
        Wrong("def my_key(parent, ids): return id(object()), torch.rand(1).item()", "another key the second time"),
        Wrong("def my_key(parent, ids): return parent", "the key is its parent's"),
        Wrong("def my_key(parent, ids): hash((parent, tuple(ids)))", "a key must come back"),
        Wrong("""
              def my_key(parent, ids):
                  if 17 in ids: raise KeyError("unlucky")
                  return hash((parent, tuple(ids)))
              """, "KeyError: 'unlucky'\n         at your line 2"),
        Wrong("""
              def my_key(parent, ids):
                  return hash((parent, tuple(ids))) if max(ids) > 25 or len(ids) < 4 else hash(tuple(ids))
              """, "in the engine: "),
        Wrong("def my_key(parent, ids): return hash((parent, ids))", "unhashable type: 'list'"),
        Right("def my_key(parent, ids): return hash((parent, tuple(ids)))"),
        Right("""
              import hashlib
              def my_key(parent, ids):
                  return hashlib.sha256(parent + b"".join(i.to_bytes(4, "little") for i in ids)).digest()
              """),
        Right("def my_key(parent, ids): return str(parent) + '|' + ','.join(map(str, ids))"),
    ],
    "MyPool": [
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  def allocate(self):
                      return 0
                  def share(self, block): pass
                  def release(self, block): pass
              """, "operation 1: allocate(): users is [0, 0, 0], and must be [1, 0, 0]"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  def allocate(self):
                      if 0 not in self.users: return None
                      block = self.users.index(0)
                      self.users[block] = 1
                      return block
                  def share(self, block): self.users[block] += 1
                  def release(self, block):
                      self.users[block] -= 1
                      if self.users[block] < 0: raise ValueError(f"nobody uses block {block}")
              """, "which no sequence uses: users is [0, 0, -1], and must be [0, 0, 0]"),
        Wrong("class MyPool:\n    def __init__(self, n): self.users = [0] * n\n    def allocate(self): return 3\n"
              "    def share(self, block): pass\n    def release(self, block): pass", "the number of a block must"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users, self.next = [0] * num_blocks, -1
                  def allocate(self):
                      self.next += 1
                      if self.next >= len(self.users): return None
                      self.users[self.next] += 1
                      return self.next
                  def share(self, block): self.users[block] += 1
                  def release(self, block):
                      if not self.users[block]: raise ValueError(block)
                      self.users[block] -= 1
              """, "it gives nothing, though no sequence uses block 0"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users, self.free = [0] * num_blocks, list(range(num_blocks))
                  def allocate(self):
                      block = self.free.pop() if self.free else None
                      if block is not None: self.users[block] += 1
                      return block
                  def share(self, block): self.users[block] += 1
                  def release(self, block):
                      if not self.users[block]: raise ValueError(block)
                      self.users[block] -= 1
                      self.free.append(block)
              """, "2, which is in use: how do you know that a block is free?"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  def allocate(self):
                      block = self.users.index(0) if 0 in self.users else None
                      if block is not None: self.users[block] = 1
                      return block
                  def share(self, block): self.users[block] += 1
                  def release(self, block): self.users[block] -= 1
              """, "nothing is raised: what is given back twice would be handed out twice"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  def allocate(self):
                      block = self.users.index(0) if 0 in self.users else None
                      if block is not None: self.users[block] = 1
                      return block
                  def share(self, block): self.users[block] += 1
                  def release(self, block):
                      assert self.users[block], "nobody uses it"
                      self.users[block] -= 1
              """, " no sequence uses: AssertionError is raised; a ValueError is asked for"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  def allocate(self):
                      block = self.users.index(0)
                      self.users[block] = 1
                      return block
                  def share(self, block): self.users[block] += 1
                  def release(self, block):
                      if not self.users[block]: raise ValueError(block)
                      self.users[block] -= 1
              """, "while no block is free: ValueError: 0 is not in list at your line 5: block = "),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  def allocate(self):
                      block = self.users.index(0) if 0 in self.users else None
                      if block is not None: self.users[block] = 1
                      return block
                  def share(self, block): self.users[block] = 2
                  def release(self, block):
                      if not self.users[block]: raise ValueError(block)
                      self.users[block] = 0
              """, "share(2): users is [1, 1, 2], and must be [1, 1, 1]"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * 18
              """, "0, 0, 0, 0, 0, 0, 0, 0], and must be [0, 0, 0]"),
        Wrong("""
              class MyPool:
                  def __init__(self):
                      self.users = []
              """, "it must take (num_blocks)"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.free = set(range(num_blocks))
              """, "MyPool has no users"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  def allocate(self):
                      if len(self.users) > 8: raise RuntimeError("how many?")
                      block = self.users.index(0) if 0 in self.users else None
                      if block is not None: self.users[block] = 1
                      return block
                  def share(self, block): self.users[block] += 1
                  def release(self, block):
                      if not self.users[block]: raise ValueError(block)
                      self.users[block] -= 1
              """, "in the engine: RuntimeError: how many?\n         at your line 5"),
        Wrong("""
              class MyPool:
                  users = [0] * 40
                  def __init__(self, num_blocks):
                      MyPool.users[:] = [0] * num_blocks
                  def allocate(self):
                      block = self.users.index(0) if 0 in self.users else None
                      if block is not None: self.users[block] = 1
                      return block
                  def share(self, block): self.users[block] += 1
                  def release(self, block):
                      if not self.users[block]: raise ValueError(block)
                      self.users[block] -= 1
              """, "is made, and of the first one users is [0, 0, 0], and must be [1, 2, 1]"),
        Wrong("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  async def allocate(self):
                      return 0
              """, "operation 1: allocate(): with async def, a call gives a coroutine"),
        Right("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users, self.free = [0] * num_blocks, set(range(num_blocks))
                  def allocate(self):
                      block = self.free.pop() if self.free else None
                      if block is not None: self.users[block] += 1
                      return block
                  def share(self, block):
                      self.free.discard(block)
                      self.users[block] += 1
                  def release(self, block):
                      if not self.users[block]: raise ValueError(f"nobody uses block {block}")
                      self.users[block] -= 1
                      if not self.users[block]: self.free.add(block)
              """),
        Right("""
              class MyPool:
                  def __init__(self, num_blocks):
                      self.users = [0] * num_blocks
                  def allocate(self):
                      for block, count in enumerate(self.users):
                          if count == 0:
                              self.users[block] = 1
                              return block
                  def share(self, block): self.users[block] += 1
                  def release(self, block):
                      if not self.users[block]: raise ValueError(f"nobody uses {block}")
                      self.users[block] -= 1
              """),
    ],
}
