"""Notebook 13: sums that are waited for, buffers that are free, rows that are a rank's own."""

from helpers.answers import Right, Wrong


def overlapped(rows="x.chunk(parts)", product="rows @ weight.T",
               start="works.append(all_reduce(sums[-1], async_op=True))",
               end="for work in works:\n        work.wait()", back="torch.cat(sums)"):
    """The solution, line by line."""
    return (f"def my_overlapped_row_parallel(x, weight, parts):\n    sums, works = [], []\n    for rows in {rows}:\n"
            f"        sums.append({product})\n        {start}\n    {end}\n    return {back}\n")


def buffered(free="if i >= 2:\n            take_out(i - 2)", copy="buffer.copy_(part)", which="i % 2",
             out="works[i].wait()\n        sums.append(buffers[WHICH][:len(parts[i])].clone())", back="sums",
             left="for i in range(len(sums), len(parts)):\n        take_out(i)"):
    """The solution, line by line."""
    return (f"def my_two_buffers(parts, buffers):\n    works, sums = [], []\n    def take_out(i):\n        {out}\n"
            f"    for i, part in enumerate(parts):\n        {free}\n        buffer = buffers[WHICH][:len(part)]\n"
            f"        {copy}\n        works.append(all_reduce(buffer, async_op=True))\n    {left}\n"
            f"    return {back}\n").replace("WHICH", which)


def ring(first="rank() - 1", count="len(sizes) - 1", step="at -= 1", into="pass_on(summed) + rows[at % len(sizes)]",
         back="summed"):
    """The solution, line by line."""
    return (f"def my_reduce_scatter(x, sizes, pass_on):\n    rows, at = x.split(sizes), {first}\n"
            f"    summed = rows[at % len(sizes)]\n    for _ in range({count}):\n        {step}\n"
            f"        summed = {into}\n    return {back}\n")


def layer(one="reduce_scatter(attention(all_gather(input_norm(own), 0, sizes)), 0, sizes)", first="own + ONE",
          two="reduce_scatter(mlp(all_gather(post_norm(mid), 0, sizes)), 0, sizes)", second="mid + TWO"):
    """The solution in two lines."""
    return (""
            "def my_sequence_parallel_layer(own, sizes, input_norm, attention, post_norm, mlp):\n"
            f"    mid = {first.replace('ONE', one)}\n    return {second.replace('TWO', two)}\n")


ANSWERS = {
    "my_overlapped_row_parallel": [
        Wrong(overlapped(start="works.append(all_reduce(sums[-1], async_op=True))\n        barrier()"),
              "with 2 collectives besides the sums that are started"),
        Wrong(overlapped(end="early = torch.cat(sums)\n    for work in works: work.wait()", back="early"),
              "a rank's own summand stands at every token. A sum is in its tensor behind its wait()"),
        Wrong(overlapped(end="pass"), "without wait() for all_reduce [3, 5], all_reduce [3, 5]"),
        Wrong(overlapped(end="works[-1].wait()"), "without wait() for all_reduce [3, 5] at"),
        Wrong(overlapped(start="all_reduce(sums[-1])"), "and no sum is started: all_reduce(…, async_op=True) returns"),
        Wrong(overlapped(start="pass"), "a rank's own summand stands at every token. Where are the summands added up?"),
        Wrong(overlapped(start="all_reduce(sums[-1], async_op=True).wait()"),
              "sum 1 is waited for before product 2: nothing is computed while it is under way"),
        Wrong(overlapped(rows="[x]"), "with one sum where 2 parts are asked for"),
        Wrong("""
              def my_overlapped_row_parallel(x, weight, parts):
                  sums = list((x @ weight.T).chunk(parts))
                  works = [all_reduce(part, async_op=True) for part in sums]
                  for work in works: work.wait()
                  return torch.cat(sums)
              """, "when sum 2 of 2 starts, 1 of 1 products have been computed"),
        Wrong(overlapped(back="all_reduce(torch.cat(sums))"), "this is 2 times the sum"),
        Wrong(overlapped(back="torch.cat(sums) / world_size()"), "averaged: this is the sum divided by"),
        Wrong(overlapped(rows="x.split(len(x) // parts)[:parts]"), "it returns [6, 4]; [tokens, outputs] = [7, 4]"),
        Wrong(overlapped(product="rows @ weight"), "mat1 and mat2 shapes cannot be multiplied"),
        Wrong(overlapped(back="sums"), "it returns a list of 2; a tensor [tokens, outputs] = [6, 5] must come back"),
        Wrong(overlapped(start="if rank() == 0: works.append(all_reduce(sums[-1], async_op=True))"), "waits in"),
        Wrong(overlapped(back="torch.cat(sums[::-1])"), "has what belongs to token 3; token 1 has what belongs to tok"),
        Wrong(overlapped(product="(rows.half() @ weight.half().T).to(x.dtype)"), "has lost digits"),
        Right(overlapped()),
        Right(overlapped(rows="x.tensor_split(parts)")),
        Right("""
              def my_overlapped_row_parallel(x, weight, parts):
                  out, before = x.new_empty(len(x), len(weight)), None
                  for into, rows in zip(out.chunk(parts), x.chunk(parts)):
                      torch.mm(rows, weight.T, out=into)
                      work = all_reduce(into, async_op=True)
                      if before is not None:
                          before.wait()
                      before = work
                  before.wait()
                  return out
              """),
        Wrong(overlapped(rows="weight.chunk(parts)", product="x @ rows.T", back="torch.cat(sums, dim=1)"),
              "one of the sums has 18 numbers, where each token has 5: cut the tokens, and not the outputs"),
    ],
    "my_two_buffers": [
        Wrong(buffered(out="sums.append(buffers[WHICH][:len(parts[i])].clone())\n        works[i].wait()"),
              "part 0 is this rank's own summand: it is copied out before its wait()"),
        Wrong(buffered(free="pass"), "in the place of part 0's sum stands what part 2 makes"),
        Wrong(buffered(out="works[i].wait()\n        sums.append(buffers[WHICH][:len(parts[i])])"),
              "it returns a piece of buffer 0, which is used again; each sum must be in a tensor of its"),
        Wrong(buffered(free="if i >= 1:\n            take_out(i - 1)"),
              "at wait 1 of 4 one sum is under way, though 4 are left"),
        Wrong(buffered(copy="buffer = part.clone()"), "a sum is started in a tensor that is none of the buffers"),
        Wrong(buffered(left="pass"), "without wait() for all_reduce [2, 4]"),
        Wrong("def my_two_buffers(parts, buffers): return [all_reduce(part.clone()) for part in parts]",
              "the sums are right, and 0 of 4 are started with async_op=True"),
        Wrong(buffered(back="torch.cat(sums)"), "a list with the sum of every part must come back"),
        Wrong(buffered(out="works[i].wait()\n        sums.append(buffers[WHICH].clone())"),
              "it returns [3, 3]; [rows, hidden] = [1, 3] must come back"),
        Wrong(buffered(copy="buffer += part"), " part 0: what stood in the buffer before, or behind the part, is in i"),
        Right(buffered()),
        Right("""
              def my_two_buffers(parts, buffers):
                  flying, sums = [], []
                  for i in range(len(parts) + 2):
                      if i >= 2:
                          work, place = flying.pop(0)
                          work.wait()
                          sums.append(place.clone()) if len(sums) < len(parts) else None
                      if i < len(parts):
                          place = buffers[i % 2][:len(parts[i])]
                          place.copy_(parts[i])
                          flying.append((all_reduce(place, async_op=True), place))
                      elif not flying:
                          break
                  return sums
              """),
    ],
    "my_reduce_scatter": [
        Wrong(ring(first="rank()"), "each rank ends with the sum of the next rank's rows"),
        Wrong(ring(into="pass_on(summed)"), "without its own summand of these rows"),
        Wrong(ring(count="0", first="rank()"), "each rank returns its own summand of its rows"),
        Wrong(ring(count="len(sizes)"), "a rank's own summand is in it twice: after 1 message all have added theirs"),
        Wrong(ring(back="summed / len(sizes)"), "the sum is divided by 2"),
        Wrong(ring(back="x"), "[rows kept, hidden] = [3, 4] must come back"),
        Wrong("def my_reduce_scatter(x, sizes, pass_on): return all_reduce(x.clone()).split(sizes)[rank()]",
              "rank 0 calls all_reduce: pass_on is enough, once for each other rank's rows"),
        Wrong("def my_reduce_scatter(x, sizes, pass_on): return all_reduce(x.split(sizes)[rank()].clone())",
              "cuts its rows out before they are added up, and a sum adds up what stands at the same place"),
        Wrong("""
              def my_reduce_scatter(x, sizes, pass_on):
                  total = other = x
                  for _ in range(len(sizes) - 1):
                      other = pass_on(other)
                      total = total + other
                  return total.split(sizes)[rank()]
              """, "sends 24 numbers where 12 are enough: the rows of each other rank, once"),
        Wrong(ring(into="pass_on(summed)\n    summed = summed + rows[rank()]"), "wrong"),
        Wrong(ring(step="at += 1"), "gets larger with each message: rows come from the rank before"),
        Wrong(ring(count="len(sizes) - 1 if rank() else 0"), "Every rank makes the same calls"),
        Wrong(ring(back="None"), "is a return missing?"),
        Wrong(ring(into="pass_on(len(sizes)) + rows[at % len(sizes)]"), "pass_on takes rows to send, not int"),
        Right(ring()),
        Right("""
              def my_reduce_scatter(x, sizes, pass_on):
                  size, begins = world_size(), [sum(sizes[:r]) for r in range(world_size())]
                  def own(r):
                      return x[begins[r % size]:begins[r % size] + sizes[r % size]]
                  total = own(rank() + size - 1)
                  for step in range(2, size + 1):
                      total = pass_on(total).add(own(rank() + size - step))
                  return total
              """),
    ],
    "my_sequence_parallel_layer": [
        Wrong(layer(first="ONE"), "the first residual is missing"),
        Wrong(layer(second="TWO"), "the second residual is missing"),
        Wrong(layer(second="own + TWO"), "the second residual is what came into the layer"),
        Wrong(layer(one="reduce_scatter(attention(all_gather(own, 0, sizes)), 0, sizes)"),
              "attention reads rows that are not normalised"),
        Wrong(layer(two="reduce_scatter(mlp(all_gather(mid, 0, sizes)), 0, sizes)"),
              "the MLP reads rows that are not normalised"),
        Wrong(layer(one="reduce_scatter(attention(input_norm(all_gather(own, 0, sizes))), 0, sizes)"),
              "input_norm is given 6 rows, of which it keeps 3: normalise before you gather"),
        Wrong(layer(one="reduce_scatter(attention(input_norm(own)), 0, sizes)"),
              "attention is given 3 of 6 rows: its heads and columns are this rank's"),
        Wrong(layer(one="attention(all_gather(input_norm(own), 0, sizes)).split(sizes)[rank()]"),
              "a rank goes on with its own summand of its rows"),
        Wrong(layer(one="all_reduce(attention(all_gather(input_norm(own), 0, sizes))).split(sizes)[rank()]"),
              "1 × all_reduce"),
        Wrong(layer(one="all_reduce(attention(all_gather(input_norm(own), 0, sizes)).split(sizes)[rank()].clone())"),
              "each rank cuts its rows out before they are added up"),
        Wrong("""
              def my_sequence_parallel_layer(own, sizes, input_norm, attention, post_norm, mlp):
                  x = all_gather(own, 0, sizes)
                  own = reduce_scatter(x + attention(all_gather(input_norm(own), 0, sizes)), 0, sizes)
                  return own + reduce_scatter(mlp(all_gather(post_norm(own), 0, sizes)), 0, sizes)
              """, "the first residual is in it 2 times: is it added before"),
        Wrong("""
              def my_sequence_parallel_layer(own, sizes, input_norm, attention, post_norm, mlp):
                  x = all_gather(input_norm(own), 0, sizes)
                  return own + reduce_scatter(attention(x) + mlp(x), 0, sizes)
              """, "the MLP is given what attention was given"),
        Wrong(layer(one="reduce_scatter(attention(all_gather(post_norm(own), 0, sizes)), 0, sizes)",
                    two="reduce_scatter(mlp(all_gather(input_norm(mid), 0, sizes)), 0, sizes)"),
              "the two norms are exchanged"),
        Wrong(layer(one="reduce_scatter(attention(all_gather(input_norm(own), 0)), 0)"),
              "with tensors of the same dtype and, where no sizes=[…] are given, of the same shape"),
        Wrong(layer(second="all_gather(mid + TWO, 0, sizes)"), "[rows kept, hidden] = [3, 4] must come back"),
        Wrong(layer(second="mid"), "the MLP is missing"),
        Wrong("def my_sequence_parallel_layer(own, sizes, input_norm, attention, post_norm, mlp): return own",
              "it comes back as it went in"),
        Right(layer()),
        Right("""
              def my_sequence_parallel_layer(own, sizes, input_norm, attention, post_norm, mlp):
                  for norm, block in ((input_norm, attention), (post_norm, mlp)):
                      summand = block(all_gather(norm(own), dim=0, sizes=sizes))
                      own = reduce_scatter(summand, sizes=sizes) + own
                  return own
              """),
    ],
}
