"""A case file. It holds the solution: do not read on if you want to solve the case."""

import torch

from course.cases.case_file import Bug, CaseFile, Trial
from tplab.faults.fault import two_ranks


def offer(scores_here, first):
    scores, ids = scores_here.float().log_softmax(-1).max(dim=-1)
    return torch.stack([scores.double(), (ids + first).double()], dim=-1)


def softened(scores_here, first):
    scores, ids = scores_here.float().softmax(-1).max(dim=-1)
    return torch.stack([scores.double(), (ids + first).double()], dim=-1)


def of_the_part(scores_here, first):
    scores, ids = scores_here.double().max(dim=-1)
    return torch.stack([scores, ids.double()], dim=-1)


def smallest(scores_here, first):
    scores, ids = scores_here.double().min(dim=-1)
    return torch.stack([scores, (ids + first).double()], dim=-1)


def trials(take):
    return (Trial("four prompts, the last twelve tokens of each one by one",
                  [take(40), take(31), take(25), take(36)], 12),
            Trial("two prompts, the last ten tokens of each one by one", [take(30), take(23)], 10))


CASE = CaseFile(
    title="All logits agree with transformers, the text does not",
    report="Our CI compares the gathered logits with allclose, and it is green on one, two and four ranks. The greedy "
           "text on {ranks} ranks differs from that on one rank, from some word on, every time. Temperature is 0. All "
           "ranks print the same token. Since last week we log probabilities with each token.",
    trials=trials, needs=two_ranks,
    bugs=(Bug("offer", offer, "a part is used as if it were the whole", "softmax_before_gather"),),
    why={
        "Each rank normalizes the scores of its own part of the vocabulary, so a rank without any good word offers its "
        "best one with a high probability.": "",
        "Each rank draws its own token, and rank 0's is printed.":
            "all ranks agree on a token in every step: they choose from the same offers",
        "The ranks' offers come back in another order than their vocabularies.":
            "then a token's id would be wrong and the right score would win; here another score wins",
        "Rounding: two words have nearly the same logit.":
            "the drawn token's logit is below the largest by far more than rounding",
    },
    elsewhere={
        "best_offer": "it takes the largest offer; the offers are wrong",
        "ParallelLMHead.gather": "the gathered logits are right",
        "TensorParallelCausalLM.compute_logits": "the point logits is right, on every rank",
        "sample": "it gets an offer from each rank and takes the best; look at the function that makes the offer",
    },
    hints=("align_decode records in report.decode.drawn what each rank drew: compare it with the logits' argmax.",
           "The drawn token is always the best one of its own rank's part.",
           "Which numbers of two ranks can be compared, and which cannot?"),
    false_repairs=[{"offer": wrong} for wrong in (softened, of_the_part, smallest)],
)
