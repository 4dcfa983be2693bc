"""How well a model remembers: ``python -m course.fable.recall [--stories N]``.

The model is given the openings of held-out stories and continues them greedily. The grammar reads the
continuation and checks, at each reference of the plot, whether it has the right name, animal, colour, place or thing. A
right model is right nearly everywhere; with a broken cache or wrong positions it names wrong ones, or writes nonsense.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from course.fable import CHECKPOINT, Story, stories
from course.fable.reading import Reading, read
from tplab.errors import TplabError

# A body is at most about 150 tokens long. A longer continuation is no body of the plot.
MAX_NEW_TOKENS = 192
BATCH_SIZE = 64
EOS = "<|endoftext|>"

Generate = Callable[[list[list[int]], int], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class RecallReport:
    """What became of the stories; ``str(report)`` is a small table."""

    readings: tuple[Reading, ...]

    def counts(self) -> dict[str, tuple[int, int]]:
        """kind -> (references that are right, references), and "overall"."""
        answers = [a for r in self.readings for a in r.answers]
        kinds = sorted({a.kind for a in answers})
        counts = {k: (sum(a.right for a in answers if a.kind == k), sum(a.kind == k for a in answers)) for k in kinds}
        return counts | {"overall": (sum(a.right for a in answers), len(answers))}

    def percent(self, kind: str = "overall") -> float:
        """Share of the references of this kind that are right, in %."""
        right, of = self.counts()[kind]
        return 100 * right / of

    @property
    def grammatical(self) -> float:
        """Share of the continuations that the grammar can read from beginning to end, in %."""
        return 100 * sum(r.grammatical for r in self.readings) / len(self.readings)

    def __str__(self):
        lines = [f"{kind:<12}{100 * right / of:6.1f} %  {right}/{of}" for kind, (right, of) in self.counts().items()]
        return "\n".join([*lines, f"{'grammatical':<12}{self.grammatical:6.1f} %  of {len(self.readings)} stories"])


def recall(generate: Generate, stories: Sequence[Story], folder: Path = CHECKPOINT) -> RecallReport:
    """Let a model continue the openings of ``stories`` and check every back-reference.

    ``generate(prompts, max_new_tokens)`` takes token ids, one list per opening, and returns the new ids of each,
    greedily chosen, without the prompt; whatever follows the end-of-story token is ignored. ``folder`` holds
    the tokenizer.
    """
    if not stories:
        raise TplabError("recall needs at least one story")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    prompts = [e.ids for e in tokenizer.encode_batch([s.opening for s in stories])]
    outputs = generate(prompts, MAX_NEW_TOKENS)
    if len(outputs) != len(prompts):
        raise TplabError(f"generate returned {len(outputs)} outputs for {len(prompts)} prompts")
    readings = []
    for story, ids in zip(stories, outputs, strict=True):
        ids = [int(i) for i in ids]
        body = ids[: ids.index(eos)] if eos in ids else ids
        readings.append(read(story, tokenizer.decode(body, skip_special_tokens=False)))
    return RecallReport(tuple(readings))


def reference_generate(folder: Path = CHECKPOINT) -> Generate:
    """Hugging Face's greedy ``generate`` with the model in ``folder``, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    pad = model.generation_config.pad_token_id

    def generate(prompts, max_new_tokens):
        outputs = []
        for first in range(0, len(prompts), BATCH_SIZE):
            batch = prompts[first:first + BATCH_SIZE]
            width = max(map(len, batch))
            ids = torch.tensor([[pad] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            new = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
            outputs += new[:, width:].tolist()
        return outputs

    return generate


def main():
    parser = argparse.ArgumentParser(prog="python -m course.fable.recall", description=__doc__.split(":")[0])
    parser.add_argument("--stories", type=int, default=200, help="number of held-out stories (200)")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder of the model (the embedded one)")
    args = parser.parse_args()
    print(recall(reference_generate(args.checkpoint), stories("held-out", args.stories), args.checkpoint))


if __name__ == "__main__":
    main()
