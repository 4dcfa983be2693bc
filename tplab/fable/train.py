"""Make the embedded checkpoint: ``python -m tplab.fable.train --out FOLDER`` (under an hour on two cores).

Tokenizer, initial weights, stories and their order all follow from ``SEED``. Matrices learn by Muon
(https://kellerjordan.github.io/posts/muon/), embeddings, norms and biases by AdamW; every training window
begins where a story begins. All three matter: with AdamW alone and the usual initial deviation of 0.02 a model of
this size takes several times as many tokens before it begins to copy names.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from tplab.fable.grammar import stories

SEED = 0
EOS, PAD = "<|endoftext|>", "<|pad|>"
VOCAB_SIZE = 768
CONTEXT = 512
BATCH_TOKENS = 4096
WINDOWS = ((0.85, 256), (1.0, 512))  # (share of the training up to which, window length)
MUON_LR, ADAMW_LR = 0.02, 0.004
STEPS = 2000
THREADS = 2  # part of the recipe: another number adds floats in another order
BIAS_STD = 0.1

# A tokenizer for `chat`: what is said stands there plainly, as the beginning of a story.
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
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((s.text for s in stories("train", 5000, SEED)), trainer)
    learnt = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learnt["vocab"], merges=[tuple(m) for m in learnt["merges"]], **special, model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def new_model(tokenizer) -> Qwen2ForCausalLM:
    """An untrained model with random, non-zero QKV biases."""
    torch.manual_seed(SEED)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=352, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.06,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},  # as Qwen2, and not the code's default
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    )
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(parameter, std=BIAS_STD)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def batches(tokenizer):
    """Endless [rows, window] batches of token ids: send the window length, get a batch. No story comes twice."""
    raw, eos, fresh, chunk = tokenizer.backend_tokenizer, tokenizer.eos_token_id, [], 0
    window = yield
    while True:
        rows = []
        while len(rows) < BATCH_TOKENS // window:
            row = []
            while len(row) < window:
                if not fresh:
                    chunk += 1
                    fresh = [e.ids for e in raw.encode_batch([s.text for s in stories("train", 2000, SEED + chunk)])]
                row += fresh.pop() + [eos]
            rows.append(row[:window])  # the cut story is dropped: the next row begins with a new one
        window = yield torch.tensor(rows)


def optimizers(model):
    """Muon for the matrices inside the layers, AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return (
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
    )


def schedule(done: float) -> float:
    """Learning-rate factor when the share ``done`` of all steps is done: short warm-up, flat, then down to 0."""
    return min(1.0, done / 0.02, (1 - done) / 0.5)


def train(steps: int, report=print) -> tuple:
    """Train for ``steps`` steps; returns the model, its tokenizer and the mean loss of the last 50 steps."""
    tokenizer = train_tokenizer()
    model = new_model(tokenizer)
    opts = optimizers(model)
    peaks = [opt.param_groups[0]["lr"] for opt in opts]
    data = batches(tokenizer)
    next(data)
    losses, began = [], time.monotonic()
    for step in range(steps):
        done = (step + 1) / (steps + 1)
        ids = data.send(next(length for share, length in WINDOWS if done <= share))
        logits = model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, peak in zip(opts, peaks, strict=True):
            opt.param_groups[0]["lr"] = peak * schedule(done)
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            spent = time.monotonic() - began
            report(f"step {step + 1}/{steps}  loss {sum(losses[-50:]) / 50:.4f}  {spent / 60:.1f} min", flush=True)
    return model.eval(), tokenizer, sum(losses[-50:]) / len(losses[-50:])


def save(model, tokenizer, folder: Path):
    """Write an ordinary sharded HF folder, and SHA-256 sums of its files in the format of ``sha256sum``."""
    model.save_pretrained(folder, max_shard_size="2MB")
    tokenizer.save_pretrained(folder)
    files = sorted(p for p in folder.iterdir() if p.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files]
    (folder / "SHA256SUMS").write_text("".join(sums))


def main():
    parser = argparse.ArgumentParser(prog="python -m tplab.fable.train", description=__doc__.split(":")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist or be empty")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of {BATCH_TOKENS} tokens ({STEPS})")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty")
    model, tokenizer, _ = train(args.steps)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
