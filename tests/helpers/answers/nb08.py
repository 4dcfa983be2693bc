"""Notebook 08: decisions that ranks take together."""

from helpers.answers import Right, Wrong

ANSWERS = {
    "my_mean": [
        Wrong("""
              def my_mean(shares):
                  total = torch.tensor([sum(shares[rank()]), len(shares[rank()])], dtype=torch.bfloat16)
                  summed, count = all_reduce(total).tolist()
                  return summed / count
              """, "the mean of all requests is 71057 / 7 = 10151 What is off by so little has lost digits"),
        Wrong("""
              def my_mean(shares):
                  lengths = shares[rank()]
                  total = torch.tensor([sum(lengths), len(lengths)], dtype=torch.float64)
                  if lengths:
                      all_reduce(total)
                  return (total[0] / total[1]).item()
              """, "at your line 5: all_reduce(total)\n         The requests are [[3, 5], []]: every rank"),
        Wrong("""
              def my_mean(shares):
                  lengths = shares[rank()]
                  mean = sum(lengths) / len(lengths)
                  total = torch.tensor([mean * len(lengths), len(lengths)])
                  all_reduce(total)
                  return (total[0] / total[1]).item()
              """, "on rank 1: ZeroDivisionError: division by zero\n         at your line 3: mean ="),
        Wrong("""
              def my_mean(shares):
                  lengths = shares[rank()]
                  mean = torch.tensor([sum(lengths) / max(1, len(lengths))])
                  return (all_reduce(mean) / world_size()).item()
              """, "mean of the ranks' means: how much does a rank with many requests count?"),
        Wrong("""
              def my_mean(shares):
                  lengths = shares[rank()]
                  total = torch.tensor([float(sum(lengths)), len(lengths)])
                  all_reduce(total)
                  return total[0] / len(lengths) if lengths else total[0] / total[1]
              """, "on rank 0 it says 9; the mean of all requests is 18 / 3 = 6"),
        Wrong("""
              def my_mean(shares):
                  lengths = shares[rank()]
                  return sum(lengths) / max(1, len(lengths))
              """, "4; the mean of all requests is 18 / 3 = 6 That is the mean of its own requests"),
        Wrong("""
              def my_mean(shares):
                  lengths = shares[rank()]
                  total = torch.tensor([sum(lengths), len(lengths)], dtype=torch.float64)
                  all_reduce(total)
                  if lengths:
                      return (total[0] / total[1]).item()
              """, "nothing (is a return missing?); a number, on every rank, must come back"),
        Wrong("""
              def my_mean(shares):
                  lengths = shares[rank()]
                  every = all_gather(torch.tensor(lengths, dtype=torch.float64))
                  return every.mean().item()
              """, "the ranks meet in different collectives: rank 0 calls all_gather [2] float64"),
        Wrong("""
              def my_mean(shares):
                  lengths = shares[rank()]
                  total = torch.tensor([sum(lengths), len(lengths)], dtype=torch.float64)
                  return all_reduce(total)[0].item() / all_reduce(total)[1].item()
              """, "That is the mean divided by 2, the number of ranks"),
        Wrong("def my_mean(shares): return all_reduce(shares[rank()])", "all_reduce takes a tensor, not list"),
        Right("""
              def my_mean(shares):
                  total = torch.tensor([sum(shares[rank()]), len(shares[rank()])])
                  summed, count = all_reduce(total).tolist()
                  return summed / count
              """),
        Wrong("""
              def my_mean(shares):
                  sizes = [len(share) for share in shares]
                  return all_gather(torch.tensor(shares[rank()], dtype=torch.float32), sizes=sizes).mean()
              """, "shares[1] is on another rank; here is shares[rank()], shares[0]. What tells a rank"),
    ],
    "my_agree": [
        Wrong("""
              def my_agree(work):
                  failed = torch.zeros(4)
                  try:
                      work()
                  except Exception:
                      failed[rank()] = 1
                  return all_reduce(failed).nonzero().flatten().tolist()
              """, "IndexError: index 4 is out of bounds"),
        Wrong("""
              def my_agree(work):
                  work()
                  return []
              """, "shard 1 cannot be read\n         at your line 2: work()\n         Uncaught"),
        Wrong("""
              def my_agree(work):
                  failed = torch.zeros(world_size())
                  try:
                      work()
                      all_reduce(failed)
                  except Exception:
                      failed[rank()] = 1
                  return failed.nonzero().flatten().tolist()
              """, "at your line 5: all_reduce(failed)\n         Every rank has to come, whether its"),
        Wrong("""
              def my_agree(work):
                  try:
                      work()
                  except Exception:
                      return [rank()]
                  return []
              """, "where it must say [1, 4], after no collective: what tells it about all others?"),
        Wrong("""
              def my_agree(work):
                  failed = torch.zeros(world_size())
                  try:
                      work()
                  except Exception:
                      failed[rank()] = 1
                  broadcast(failed)
                  return failed.nonzero().flatten().tolist()
              """, "it must say [1, 4], after broadcast: what tells it about all others?"),
        Wrong("""
              def my_agree(work):
                  failed = torch.zeros(1)
                  try:
                      work()
                  except Exception:
                      failed += rank()
                  all_reduce(failed)
                  return [int(failed)] if failed else []
              """, "their numbers are added up, where each rank needs a place of its own"),
        Wrong("""
              def my_agree(work):
                  failed = torch.zeros(world_size())
                  try:
                      work()
                  except Exception:
                      failed[rank()] = 1
                  all_reduce(failed)
                  return failed.sum().item()
              """, "a list of whole numbers must come back, the failed ranks, which are [1, 4]"),
        Wrong("""
              def my_agree(work):
                  try:
                      work()
                      failed = torch.zeros(world_size())
                  except Exception:
                      barrier()
                      return [rank()]
                  barrier()
                  return []
              """, " [1, 4], after barrier: what tells it about all others?"),
        Wrong("""
              def my_agree(work):
                  failed = torch.zeros(world_size())
                  try:
                      work()
                  except Exception:
                      failed[rank()] = 1
                  all_reduce(failed)
                  return [int(failed.argmax())] if failed.any() else []
              """, "of 5 ranks, ranks 1 and 4 failed: rank 0 says [1] where it must say [1, 4]"),
        Wrong("""
              def my_agree(work):
                  failed = torch.zeros(world_size())
                  for attempt in range(2):
                      try:
                          work()
                      except Exception:
                          failed[rank()] = 1
                  all_reduce(failed)
                  return failed.nonzero().flatten().tolist()
              """, "rank 0 does its work 2 times; once is asked"),
        Right("""
              def my_agree(work):
                  ok = 1
                  try:
                      work()
                  except Exception as error:
                      ok = 0
                  every = all_gather(torch.tensor([ok]))
                  return [number for number, fine in enumerate(every.tolist()) if not fine]
              """),
    ],
    "my_rounds": [
        Wrong("""
              def my_rounds(write, read, rounds):
                  seen = []
                  for number in range(3):
                      if rank() == 0:
                          write(number)
                      barrier()
                      seen.append(read())
                      barrier()
                  return seen
              """, "rank 0 writes 3 times in 1 round"),
        Wrong("""
              def my_rounds(write, read, rounds):
                  seen = []
                  for number in range(rounds):
                      if rank() == 0:
                          write(number)
                      seen.append(read())
                  return seen
              """, "round 0: nothing makes rank 1 wait: it may read before rank 0 has written"),
        Wrong("""
              def my_rounds(write, read, rounds):
                  seen = []
                  for number in range(rounds):
                      if rank() == 0:
                          write(number)
                      barrier()
                      seen.append(read())
                  return seen
              """, "round 0: nothing makes rank 0 wait: it may write round 1 while rank 1 still has to read round 0"),
        Wrong("""
              def my_rounds(write, read, rounds):
                  seen = []
                  for number in range(rounds):
                      if rank() == 0:
                          write(number)
                          barrier()
                      seen.append(read())
                  return seen
              """, "Which rank has not come? A barrier is for all"),
        Wrong("""
              def my_rounds(write, read, rounds):
                  seen = []
                  for number in range(rounds):
                      barrier()
                      if rank() == 0:
                          write(number)
                      barrier()
                      seen.append(read())
                      barrier()
                  return seen
              """, "9 collectives in 3 rounds; each one is a meeting that costs time, and 6 are enough"),
        Wrong("""
              def my_rounds(write, read, rounds):
                  seen = []
                  for number in range(rounds):
                      write(number)
                      barrier()
                      seen.append(read())
                      barrier()
                  return seen
              """, "rank 1 writes too; the file has one writer, rank 0"),
        Wrong("""
              def my_rounds(write, read, rounds):
                  seen = []
                  for number in range(rounds):
                      if rank() == 0:
                          write(number)
                      barrier()
                      if rank() != 0:
                          seen.append(read())
                      barrier()
                  return seen
              """, "rank 0 reads 0 times in 3 rounds"),
        Wrong("""
              def my_rounds(write, read, rounds):
                  for number in range(rounds):
                      if rank() == 0:
                          write(number)
                      barrier()
                      seen = read()
                      barrier()
                  return seen
              """, "rank 0 returns 2 (int); what it read must come back, [0, 1, 2]"),
        Right("""
              def my_rounds(write, read, rounds):
                  seen = []
                  for number in range(rounds):
                      if number:
                          barrier()
                      if rank() == 0:
                          write(number)
                      all_reduce(torch.zeros(1))
                      seen.append(read())
                  return seen
              """),
    ],
}
