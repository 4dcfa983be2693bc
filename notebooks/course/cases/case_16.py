"""A case file. It holds the solution: do not read on if you want to solve the case."""

from course.cases.case_file import Bug, CaseFile, Trial, engines_own
from tplab import patch
from tplab.align.run import check_prompts

DRAFTS = {"num_speculative_tokens": 4}

my_num_accepted = engines_own("num_accepted")


def num_accepted(draft, chosen):
    kept = min(1, len(draft))  # the first guess
    for drafted, choice in zip(draft[1:], chosen[1:]):  # compared with the choice after the guess before
        if drafted != choice:
            break
        kept += 1
    return kept


def all_that_agree(draft, chosen):
    return sum(drafted == choice for drafted, choice in zip(draft, chosen))


def none_at_all(draft, chosen):
    return 0


def long_ones(draft, chosen):
    return my_num_accepted(draft, chosen) if len(draft) > 3 else num_accepted(draft, chosen)


def said_again(begin, kept, goes_on):
    """Eight tokens, the first four again, ``kept`` more, a token that differs from the next one, and what follows."""
    at = 4 + kept
    other = next(token for token in goes_on if token != begin[at])
    return [*begin, *begin[:at], other, *begin[at + 1:], *goes_on]


def trials(take):
    return (Trial("a text that repeats its first four words and then goes on with others",
                  [said_again(take(8), 0, take(6))], 11, DRAFTS),
            Trial("two texts that repeat their first words, one of them one word more",
                  [said_again(take(8), 1, take(6)), said_again(take(8), 0, take(5))], 10, DRAFTS),
            *(Trial(f"a text with at most {count} guesses at a time", [said_again(take(8), 0, take(6))], 11,
                    {"num_speculative_tokens": count}) for count in (2, 1)))


def user_output(ckpt, ranks, prompts):
    from tplab import LLM, SamplingParams

    (ids, *_) = check_prompts(ckpt, ["One warm morning the red fox met an old friend. One warm morning the"])
    texts = {}
    with patch.applied(*CASE.patches):
        for count in (0, 4):
            with LLM(ckpt, ranks, block_size=4, logical=True, num_speculative_tokens=count) as llm:
                params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
                texts[count] = llm.generate([ids], params, use_tqdm=False)[0].outputs[0].text
    return ("The user's own prompt, not the run of the instruments, says something twice. Without drafts: "
            f"{texts[0]!r}. With four tokens drafted: {texts[4]!r}.")


CASE = CaseFile(
    title="With speculation, the model repeats the user's text",
    report="Since n-gram drafts are on, the answer to a prompt that says something twice goes on as the prompt did. I "
           "was told that this is rounding: in bfloat16, a token's logits do not have the same bits after a draft. "
           "With the drafts off it does not happen. It is the same with one rank as with {ranks}.",
    trials=trials, user_output=user_output,
    bugs=(Bug("num_accepted", num_accepted, "a guess is kept without a check",
              "rejected_draft_kept"),),
    why={
        "The first guess of a draft is kept whatever the model chose in its place: each guess is compared with the "
        "choice after the one before, and the first has none before it.": "",
        "A token's logits have other bits after a draft than alone, and near ties change.":
            "embed differs by as much as embeddings are large, in float64 as well, and no sum has been computed at "
            "that point",
        "Keys of rejected guesses stay in the cache, and later tokens see them.":
            "attn is right, given its q, k and v: every slot holds the key of the token that the text has there",
        "The proposer guesses from another sequence's text.":
            "one sequence alone is wrong as well; and a wrong guess does not change the text if it is checked",
    },
    elsewhere={
        "VocabParallelEmbedding.forward": "it looks up the token that it gets; in one row, the text has another",
        "propose": "it guesses what followed the same words before; it can be wrong, because the guesses are checked "
                   "later",
        "Scheduler.update_from_output": "it keeps as many guesses as it is told that the model agrees with",
        "ModelRunner.execute_model": "it draws a token after every guess, and after the newest token",
        "best_offer": "it returns the model's choice, on every rank",
        "slot_mapping": "every key is in its own slot",
    },
    not_what={"a special case is treated wrongly": "the first guess is such a case; what is not done to it?",
              "rounding is mistaken for a bug": "embed differs by as much as an embedding is large, in float64 too"},
    hints=("float64, on one rank: is anything rounded there? Which is the first point outside the floor?",
           "embed holds the embeddings of the tokens that were computed. Of which token is the row that differs?",
           "The token of that row was the first of a draft. Which function says how many of them are kept?"),
    false_repairs=[{"num_accepted": function} for function in (all_that_agree, none_at_all, long_ones)],
)
