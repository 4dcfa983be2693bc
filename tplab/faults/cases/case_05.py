"""A case file; reading on spoils it."""

import torch

from tplab.faults.case_file import Bug, CaseFile, Trial
from tplab.faults.fault import two_ranks


def offer(scores_here, first):
    scores, ids = scores_here.float().log_softmax(-1).max(dim=-1)
    return torch.stack([scores.double(), (ids + first).double()], dim=-1)


def my_offer(scores_here, first):
    scores, ids = scores_here.max(dim=-1)  # logits of all ranks can be compared; probabilities of parts cannot
    return torch.stack([scores.double(), (ids + first).double()], dim=-1)


def softened(scores_here, first):
    scores, ids = scores_here.float().softmax(-1).max(dim=-1)
    return torch.stack([scores.double(), (ids + first).double()], dim=-1)


def trials(take):
    return (Trial("four prompts, of each of which twelve tokens come one by one",
                  [take(40), take(31), take(25), take(36)], 12),
            Trial("two prompts, of each of which ten tokens come one by one", [take(30), take(23)], 10))


CASE = CaseFile(
    title="All logits agree with transformers, the text does not",
    report="We have an allclose on the logits in CI, gathered over the ranks, and it is green on one, two and four. "
           "The greedy text on {ranks} ranks is another one than on one rank, from some word on, reproducibly. "
           "Temperature is 0. All ranks print the same token. We log probabilities with each token since last week.",
    trials=trials, needs=two_ranks,
    bugs=(Bug("offer", offer, my_offer, "a part is taken for the whole", "softmax_before_gather"),),
    why={
        "Each rank normalizes the scores of its own part of the vocabulary, so a rank without any good word offers its "
        "best one with a high probability.": "",
        "Each rank draws its own token, and rank 0's is printed.":
            "all ranks agree on a token in every step: the choice between their offers is made together",
        "The ranks' offers come back in another order than their vocabularies.":
            "then a token's id would be wrong, and the right score would still win; here another score wins",
        "Rounding: two words have nearly the same logit.":
            "the drawn token's logit is below the largest by far more than rounding",
    },
    elsewhere={
        "best_offer": "it takes the largest offer; what is offered is wrong",
        "ParallelLMHead.gather": "the gathered logits are right",
        "TensorParallelCausalLM.compute_logits": "the point logits is right, on every rank",
        "sample": "it asks each rank for its offer and takes the best; look one call further",
    },
    hints=((1, "align_decode keeps in report.decode.drawn what each rank drew: compare it with the logits' argmax."),
           (2, "The token that is drawn is the best one of its own rank's part, always."),
           (2, "Which numbers of two ranks may be compared, and which not?")),
    false_repairs=({"offer": softened},),
    production="A probability among 24,000 words is compared with one among 24,000 others: the more ranks, the fewer "
               "words each has, and the surer each is of a bad one.",
    story="If logits are right and text is not, what stands between them is the sampler. The drawn tokens are in the "
          "report; beside the argmax of the gathered logits they are other ones in some places, and then always the "
          "best word of another rank. All ranks agree, so the decision is made together, over wrong offers: offer "
          "takes a log-softmax first. Its sum runs over this rank's words only. A softmax needs the whole vocabulary "
          "(its largest logit and its sum over all ranks) or none of it: for the best word the logits do.",
    sources=(("TensorRT-LLM: on one path each rank took the argmax of its own shard of the vocabulary; the merged fix "
              "gathers every rank's best value and index, and picks the largest.",
              "https://github.com/NVIDIA/TensorRT-LLM/pull/16440"),
             ("tt-metal: log-probabilities were normalized over each device's part of the vocabulary, since for one "
              "shape of the mesh the gather was skipped; a test that counted constants as equal had let it through.",
              "https://github.com/tenstorrent/tt-metal/pull/47806")),
)
