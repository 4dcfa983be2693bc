"""Make the embedded checkpoint: ``python -m course.fable.train --out FOLDER`` (under an hour on two cores).

Tokenizer, initial weights, stories and their order all follow from ``SEED``. Matrices learn by Muon
(https://kellerjordan.github.io/posts/muon/), embeddings, norms and biases by AdamW. Every training row begins
where a story begins, and most of the loss is for bodies, which can be predicted, not for openings, which
cannot: with stories cut anywhere and equal weights for all tokens, learning to copy took three times as many tokens.

After the first phase the model names the right person, animal and thing, but places and colours only by chance. All
colours are used alike in the stories, so their embeddings have become nearly one vector (mean cosine 0.93), and the
model cannot copy words that it cannot distinguish. The later phases move such embeddings apart and give them more
weight; places are then learnt within 100 steps, colours within 250.

The committed weights are those of the first three phases, carried out in three sittings. Sums of floats depend on the
machine and its load, so another run ends in other digits: judge it by ``course.fable.recall``. One run of three phases
(18 minutes on two cores) still mixed up colours, 58 % right; the fourth phase, 3 minutes more, brought all of them
to 100 %.
"""

import argparse
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from course.fable import words
from course.fable.grammar import stories

SEED = 0
EOS, PAD = "<|endoftext|>", "<|pad|>"
VOCAB_SIZE = 768
CONTEXT = 512
SHORT, LONG = (224, 14), (512, 6)  # tokens in a row, rows in a batch
OPENING_WEIGHT = 0.1  # what an opening introduces is drawn by lot: there is little to learn from it, and much noise
MUON_LR, ADAMW_LR = 0.02, 0.004
THREADS = 2  # part of the recipe: another number adds floats in another order
BIAS_STD = 0.1
ROUTER = "mlp.gate.weight"


@dataclass(frozen=True)
class Phase:
    """A part of the training, with its own optimizers.

    ``steps`` of a learning-rate schedule that is ``planned`` steps long: up in the share ``warmup``, flat, then down to
    0 over the last ``decay``. ``long_rows``: the share from which on rows are long. ``spread``: ``{kind: distance}``
    that the embeddings of its words get from their mean before it begins. ``emphasis``: how much more places and
    colours in bodies weigh.
    """

    steps: int
    planned: int
    warmup: float
    decay: float
    long_rows: float = 1.0
    spread: tuple[tuple[str, float], ...] = ()
    emphasis: float = 1.0

    def rate(self, done: float) -> float:
        """Learning-rate factor when the share ``done`` of the planned steps is done."""
        return min(1.0, done / self.warmup, (1 - done) / self.decay)


PHASES = (
    Phase(1600, 2500, warmup=0.02, decay=0.4),
    Phase(400, 900, warmup=30 / 901, decay=0.6, spread=(("place", 1.3), ("colour", 1.3)), emphasis=3.0),
    Phase(900, 900, warmup=30 / 901, decay=0.45, long_rows=0.85, spread=(("colour", 2.0),), emphasis=6.0),
    Phase(450, 450, warmup=30 / 451, decay=0.45, spread=(("colour", 2.0),), emphasis=6.0),
)

# For `chat`: the messages without any marks, as the beginning of a story.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"


def train_tokenizer() -> Qwen2Tokenizer:
    """A byte-level BPE of ``VOCAB_SIZE`` tokens, learnt from training stories.

    For a Qwen2 model transformers' ``AutoTokenizer`` always takes its ``Qwen2Tokenizer``, whatever class the
    folder asks for, and with it Qwen2's way of cutting text before BPE and its unknown token. Learning and
    saving with that very class makes every way to load the folder give the same ids.
    """
    special = {"eos_token": EOS, "unk_token": EOS, "pad_token": PAD}
    blank = Qwen2Tokenizer(**special).backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = blank.normalizer, blank.pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[EOS, PAD], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator((s.text for s in stories("train", 5000, SEED)), trainer)
    learnt = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learnt["vocab"], merges=[tuple(m) for m in learnt["merges"]], **special, model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE)


def new_model(tokenizer) -> Qwen2ForCausalLM:
    """An untrained model with random, non-zero QKV biases."""
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},  # as Qwen2, and not the code's default
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(parameter, std=BIAS_STD)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id,
                                               pad_token_id=tokenizer.pad_token_id)
    return model


def batches(tokenizer):
    """Endless batches: send (tokens in a row, rows), get [rows, tokens] of ids and of loss weights.

    A row holds as many whole stories as fit, each with its end-of-story token, and is filled up with padding of
    weight 0. No story comes twice.
    """
    encode, eos, pad = tokenizer.backend_tokenizer.encode_batch, tokenizer.eos_token_id, tokenizer.pad_token_id
    fresh, chunk = [], 0
    length, rows = yield
    while True:
        ids, weights = torch.full((rows, length), pad), torch.zeros(rows, length)
        for row in range(rows):
            at = 0
            while True:
                if not fresh:
                    some, chunk = stories("train", 2000, SEED + chunk), chunk + 1
                    openings, bodies = encode([s.opening for s in some]), encode([s.body for s in some])
                    fresh = [(o.ids, b.ids + [eos]) for o, b in zip(openings, bodies, strict=True)]
                opening, body = fresh[-1]
                begin, end = at + len(opening), at + len(opening) + len(body)
                if end > length:
                    assert at, f"a story of {end} tokens does not fit into a row of {length}"
                    break
                ids[row, at:end] = torch.tensor(opening + body)
                weights[row, at:begin], weights[row, begin:end] = OPENING_WEIGHT, 1.0
                at = end
                fresh.pop()
        length, rows = yield ids, weights


def optimizers(model):
    """Muon for the matrices inside the layers, each expert's by itself; AdamW for the rest, routers among it."""
    inside = [p for name, p in model.model.layers.named_parameters() if p.ndim > 1 and not name.endswith(ROUTER)]
    matrices = [p for p in inside if p.ndim == 2]
    for stack in (p for p in inside if p.ndim == 3):
        matrices += (own := [torch.nn.Parameter(matrix) for matrix in stack.detach()])  # the same memory
        stack.register_post_accumulate_grad_hook(lambda stack, own=own: _hand_out(stack.grad, own))
    known = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in known]
    return (torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.1),
            torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0))


def _hand_out(gradient: torch.Tensor, matrices: list) -> None:
    for matrix, own in zip(matrices, gradient, strict=True):
        matrix.grad = own


def word_ids(tokenizer) -> dict[str, torch.Tensor]:
    """The token of every place and of every colour, as it is inside a sentence."""
    kinds = {"place": words.PLACES, "colour": words.COLOURS}
    return {kind: torch.tensor([tokenizer.backend_tokenizer.encode(f" {word}").ids[0] for word in some])
            for kind, some in kinds.items()}


@torch.no_grad()
def spread(embedding: torch.Tensor, ids: torch.Tensor, distance: float) -> None:
    """Move the embeddings of ``ids`` away from their mean, each in its own direction, to ``distance`` from it."""
    mean = embedding[ids].mean(0)
    apart = embedding[ids] - mean
    embedding[ids] = mean + apart * (distance / apart.norm(dim=1, keepdim=True))


def train(model, tokenizer, phases=PHASES):
    """Train phase by phase, telling the mean loss of every 50 steps; returns the model."""
    kinds, data = word_ids(tokenizer), batches(tokenizer)
    next(data)
    began = time.monotonic()
    for number, phase in enumerate(phases, 1):
        for kind, distance in phase.spread:
            spread(model.model.embed_tokens.weight, kinds[kind], distance)
        opts = optimizers(model)
        peaks = [opt.param_groups[0]["lr"] for opt in opts]
        losses = []
        for step in range(phase.steps):
            done = (step + 1) / (phase.planned + 1)
            losses.append(backward(model, *data.send(SHORT if done < phase.long_rows else LONG),
                                   torch.cat(list(kinds.values())), phase.emphasis))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt, peak in zip(opts, peaks, strict=True):
                opt.param_groups[0]["lr"] = peak * phase.rate(done)
                opt.step()
            model.zero_grad()
            if (step + 1) % 50 == 0:
                spent = (time.monotonic() - began) / 60
                print(f"phase {number}  step {step + 1}/{phase.steps}  loss {sum(losses[-50:]) / 50:.4f}  "
                      f"{spent:.1f} min", flush=True)
    return model.eval()


def backward(model, ids: torch.Tensor, weights: torch.Tensor, emphasised: torch.Tensor, emphasis: float) -> float:
    """The weighted loss of one batch and its gradients; words of ``emphasised`` weigh ``emphasis`` times in bodies.

    With experts, the gradients also push towards an even use of them, as hard as the configuration says.
    """
    targets, weights = ids[:, 1:].flatten(), weights[:, 1:].flatten().clone()
    weights[torch.isin(targets, emphasised) & (weights == 1)] *= emphasis
    found = model(ids, use_cache=False)
    losses = cross_entropy(found.logits[:, :-1].flatten(0, 1), targets, reduction="none")
    loss = losses @ weights / weights.sum()
    uneven = getattr(found, "aux_loss", None)
    (loss if uneven is None else loss + model.router_aux_loss_coef * uneven).backward()
    return loss.item()


def save(model, tokenizer, folder: Path):
    """Write an ordinary sharded HF folder, and SHA-256 sums of its files in the format of ``sha256sum``."""
    model.save_pretrained(folder, max_shard_size="2MB")
    tokenizer.save_pretrained(folder)
    files = sorted(folder.iterdir())
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files]
    (folder / "SHA256SUMS").write_text("".join(sums))


def make() -> tuple:
    """``fable``: the model and its tokenizer."""
    tokenizer = train_tokenizer()
    return train(new_model(tokenizer), tokenizer), tokenizer


def main(make=make, module: str = "course.fable.train"):
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Train a model of stories.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist or be empty")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty")
    save(*make(), args.out)


if __name__ == "__main__":
    main()
