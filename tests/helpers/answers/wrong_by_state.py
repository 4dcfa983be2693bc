"""Answers that the second round from outside gave: a rank that stays away by its own numbers, what is kept, pairs."""

from helpers.answers import Wrong

ANSWERS = {
    "my_best_offer": [
        Wrong("""
            def my_best_offer(offer_here):
                if (offer_here[:, 0] < 0).all():
                    return offer_here[:, 1].long()
                offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                return offers[range(len(offers)), offers[:, :, 0].argmax(dim=-1), 1].long()""",
              "rank 0 returned; rank 1 waits in all_gather")],
    "my_expert_share": [
        Wrong("""
            def my_expert_share(num_experts, intermediate_size, size, whole):
                total = num_experts if whole else intermediate_size
                ends = [r * total // size for r in range(size + 1)]
                parts = list(zip(ends, ends[1:]))
                return [(part, (0, intermediate_size)) if whole else ((0, num_experts), part) for part in parts]""",
              "rank 0 gets (0, 8), which are two; range(0, 8) is all from 0 to 7")],
    "my_tree_sum": [
        Wrong("""
            remembered = {}
            def my_tree_sum(own, shares):
                key = tuple(own.shape), tuple(shares)
                if key not in remembered:
                    leaves = all_gather(own, dim=0, sizes=[len(share) for share in shares])
                    total = leaves[0]
                    for leaf in leaves[1:]:
                        total = total + leaf
                    remembered[key] = total
                return remembered[key]""", "what is kept between calls?")],
}
