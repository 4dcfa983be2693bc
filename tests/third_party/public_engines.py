"""Check public engines on a CPU, from their unchanged files: ``python tests/third_party/public_engines.py CHECKOUT …``.

A checkout is the folder of a clone, or of an unpacked wheel, of LLMs-from-scratch, reasoning-from-scratch, litgpt,
torchtune, llama-models or mistral-inference. Each engine gets a small random checkpoint, is recorded while it reads two
texts and decodes some tokens, healthy and with eight breaks, and checked; litgpt and LLMs-from-scratch with experts,
too. Not part of ``./launch test``: the tests hold none of their code.
"""

import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from lacking import Column, Lacking, Mask, Row, Vocabulary, memory_efficient_attention, provide
from safetensors.torch import load_file
from torch import nn

from course.random_weights import write_random
from tplab.align import check
from tplab.ranks import logical_ranks, rank, world_size
from tplab.record import record

LAYERS = 3
CONFIG = dict(model_type="llama", hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, intermediate_size=96, vocab_size=68, rms_norm_eps=1e-5,
              max_position_embeddings=64, tie_word_embeddings=False,
              rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
QWEN3 = CONFIG | dict(model_type="qwen3", rms_norm_eps=1e-6, head_dim=16)
QWEN3_MOE = QWEN3 | dict(model_type="qwen3_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
                         norm_topk_prob=True)
MIXTRAL = CONFIG | dict(model_type="mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=None)
TEXTS = [[3, 14, 15, 9, 26, 5, 35, 8, 30, 44, 2], [7, 40, 2, 11, 60, 33, 1, 50]]
DECODED = 3


# Engines: each a model that has the weights, and what runs one call of ``ids`` that begin at ``start``.

def loaded(model: nn.Module, state: dict[str, torch.Tensor], names: dict[str, str]) -> nn.Module:
    """The model with a checkpoint's tensors; a rank's own part where a parameter is smaller. ``names``: Hugging Face's
    modules → the engine's parameters, ``{i}`` for the layer's number."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for theirs, ours in names.items():
            for i in range(LAYERS if "{i}" in ours else 1):
                own = parameters[ours.format(i=i)]
                parts = theirs.format(i=i).split("+")
                tensor = torch.cat([state[f"{part}.weight"] for part in parts])
                for dim, size in enumerate(own.shape):
                    if size < tensor.shape[dim]:
                        tensor = tensor.chunk(world_size(), dim)[rank()]
                own.copy_(tensor)
    return model.eval()


AT = "model.layers.{i}."
BLOCK = {"q": f"{AT}self_attn.q_proj", "k": f"{AT}self_attn.k_proj", "v": f"{AT}self_attn.v_proj",
         "o": f"{AT}self_attn.o_proj", "gate": f"{AT}mlp.gate_proj", "up": f"{AT}mlp.up_proj",
         "down": f"{AT}mlp.down_proj", "norm1": f"{AT}input_layernorm", "norm2": f"{AT}post_attention_layernorm"}


def experts_named(config, block: str, names: tuple[str, ...], at: str, own: tuple[str, ...]) -> dict[str, str]:
    """The same for a router and experts: the checkpoint's ``names`` and the engine's ``own``, ``{e}`` for an expert."""
    count = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
    found = {f"{AT}{block}.gate": f"{at}gate.weight"}
    for e in range(count):
        found |= {f"{AT}{block}.experts.{e}.{name}": f"{at}{mine.format(e=e)}" for name, mine in zip(names, own)}
    return found


def named(at: str, inner: dict[str, str], embed: str, norm: str, head: str) -> dict[str, str]:
    """``names`` of :func:`loaded`, from what each is called inside of a layer."""
    return {BLOCK[short]: f"{at}{name}" for short, name in inner.items()} | {
        "model.embed_tokens": embed, "model.norm": norm, "lm_head": head}


def in_pairs(state: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """Rows of q and k in Meta's order: numbers that turn together are neighbours."""
    def order(name, tensor):
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return tensor
        return tensor.view(-1, 2, config.head_dim // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return {name: order(name, tensor) for name, tensor in state.items()}


def raschka(module: str, scale: str) -> Callable:
    def engine(state, c):
        theirs = import_module(module)
        kind = theirs.Llama3Model if hasattr(theirs, "Llama3Model") else theirs.Qwen3Model
        experts = getattr(c, "num_experts", 0)
        more = dict(num_experts=experts, num_experts_per_tok=c.num_experts_per_tok,
                    moe_intermediate_size=c.moe_intermediate_size) if experts else {}
        model = kind(dict(**more, vocab_size=c.vocab_size, emb_dim=c.hidden_size, n_heads=c.num_attention_heads,
                          n_layers=LAYERS, hidden_dim=c.intermediate_size, n_kv_groups=c.num_key_value_heads,
                          head_dim=c.head_dim, qk_norm=True, rope_base=c.rope_parameters["rope_theta"], rope_freq=None,
                          context_length=64, dtype=torch.float32))
        inner = dict(q="att.W_query.weight", k="att.W_key.weight", v="att.W_value.weight", o="att.out_proj.weight",
                     gate="ff.fc1.weight", up="ff.fc2.weight", down="ff.fc3.weight", norm1=f"norm1.{scale}",
                     norm2=f"norm2.{scale}")
        if experts:
            model.to_empty(device="cpu")  # its experts are made without numbers; its tables are made anew
            model.cos, model.sin = theirs.compute_rope_params(head_dim=c.head_dim, context_length=64,
                                                              theta_base=c.rope_parameters["rope_theta"])
            inner = {short: name for short, name in inner.items() if short not in ("gate", "up", "down")}
        names = named("trf_blocks.{i}.", inner, "tok_emb.weight", f"final_norm.{scale}", "out_head.weight")
        if kind.__name__ == "Qwen3Model":
            names |= {f"{AT}self_attn.{part}_norm": f"trf_blocks.{{i}}.att.{part}_norm.{scale}" for part in "qk"}
        if experts:
            names |= experts_named(c, "mlp", ("gate_proj", "up_proj", "down_proj"), "trf_blocks.{i}.ff.", (
                "fc1.{e}.weight", "fc2.{e}.weight", "fc3.{e}.weight"))
        caches = SimpleNamespace(now=None)

        def call(ids, start):
            if not start:
                model.reset_kv_cache()
                home = theirs if hasattr(theirs, "KVCache") else import_module("llms_from_scratch.kv_cache.utils")
                caches.now = home.KVCache(n_layers=LAYERS)
            return model(torch.tensor([ids]), cache=caches.now)
        return loaded(model, state, names), call
    return engine


def litgpt(state, c):
    provide("litgpt", __path__=[str(Path(import_home("litgpt/model.py"), "litgpt"))])  # without its front door
    experts = getattr(c, "num_local_experts", 0)
    config = import_module("litgpt.config").Config(
        name="small", block_size=64, vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, n_layer=LAYERS,
        n_head=c.num_attention_heads, n_embd=c.hidden_size, n_query_groups=c.num_key_value_heads, rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", norm_eps=c.rms_norm_eps,
        mlp_class_name="LLaMAMoE" if experts else "LLaMAMLP", n_expert=experts,
        n_expert_per_token=c.num_experts_per_tok if experts else 0, intermediate_size=c.intermediate_size,
        rope_base=c.rope_parameters["rope_theta"])
    model = import_module("litgpt.model").GPT(config)
    inner = dict(o="attn.proj.weight", gate="mlp.fc_1.weight", up="mlp.fc_2.weight", down="mlp.proj.weight",
                 norm1="norm_1.weight", norm2="norm_2.weight")
    names = named("transformer.h.{i}.", inner, "transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight")
    if experts:
        names = {theirs: ours for theirs, ours in names.items() if ".mlp." not in theirs} | experts_named(
            c, "block_sparse_moe", ("w1", "w3", "w2"), "transformer.h.{i}.mlp.", (
                "experts.{e}.fc_1.weight", "experts.{e}.fc_2.weight", "experts.{e}.proj.weight"))
    names["+".join(BLOCK[part] for part in "qkv")] = "transformer.h.{i}.attn.qkv.weight"

    def call(ids, start):
        if not start:
            model.set_kv_cache(batch_size=1)
        return model(torch.tensor([ids]), torch.arange(start, start + len(ids)))
    return loaded(model, state, names), call


def torchtune(state, c):
    model = import_module("torchtune.models.llama3").llama3(
        vocab_size=c.vocab_size, num_layers=LAYERS, num_heads=c.num_attention_heads, embed_dim=c.hidden_size,
        num_kv_heads=c.num_key_value_heads, max_seq_len=64, rope_base=c.rope_parameters["rope_theta"],
        intermediate_dim=c.intermediate_size, norm_eps=c.rms_norm_eps)
    inner = dict(q="attn.q_proj.weight", k="attn.k_proj.weight", v="attn.v_proj.weight", o="attn.output_proj.weight",
                 gate="mlp.w1.weight", up="mlp.w3.weight", down="mlp.w2.weight", norm1="sa_norm.scale",
                 norm2="mlp_norm.scale")
    names = named("layers.{i}.", inner, "tok_embeddings.weight", "norm.scale", "output.weight")
    model.setup_caches(batch_size=1, dtype=torch.float32, decoder_max_seq_len=64)

    def call(ids, start):
        if not start:
            model.reset_caches()
        positions = torch.arange(start, start + len(ids))
        mask = torch.arange(64)[None] <= positions[:, None]
        return model(torch.tensor([ids]), mask=mask[None], input_pos=positions[None])
    return loaded(model, in_pairs(state, c), names), call


META = dict(q="attention.wq.weight", k="attention.wk.weight", v="attention.wv.weight", o="attention.wo.weight",
            gate="feed_forward.w1.weight", up="feed_forward.w3.weight", down="feed_forward.w2.weight",
            norm1="attention_norm.weight", norm2="ffn_norm.weight")


def llama_models(state, c):
    provide("fairscale.nn.model_parallel.initialize", get_model_parallel_world_size=world_size)
    provide("fairscale.nn.model_parallel.layers", ColumnParallelLinear=Column, RowParallelLinear=Row,
            VocabParallelEmbedding=Vocabulary)
    args = import_module("llama_models.llama3.args").ModelArgs(
        dim=c.hidden_size, n_layers=LAYERS, n_heads=c.num_attention_heads, n_kv_heads=c.num_key_value_heads,
        vocab_size=c.vocab_size, multiple_of=c.intermediate_size, norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_parameters["rope_theta"], max_batch_size=1, max_seq_len=64)
    model = import_module("llama_models.llama3.model").Transformer(args)
    names = named("layers.{i}.", META, "tok_embeddings.weight", "norm.weight", "output.weight")
    return loaded(model, in_pairs(state, c), names), lambda ids, start: model(torch.tensor([ids]), start)


def mistral(state, c):
    provide("xformers.ops.fmha", memory_efficient_attention=memory_efficient_attention)
    provide("xformers.ops.fmha.attn_bias", AttentionBias=Mask, BlockDiagonalMask=Mask, BlockDiagonalCausalMask=Mask,
            BlockDiagonalCausalWithOffsetPaddedKeysMask=Mask)
    args = import_module("mistral_inference.args").TransformerArgs(
        dim=c.hidden_size, n_layers=LAYERS, head_dim=c.head_dim, hidden_dim=c.intermediate_size,
        n_heads=c.num_attention_heads, n_kv_heads=c.num_key_value_heads, norm_eps=c.rms_norm_eps,
        vocab_size=c.vocab_size, max_batch_size=1, rope_theta=c.rope_parameters["rope_theta"])
    model = import_module("mistral_inference.transformer").Transformer(args)
    names = named("layers.{i}.", META, "tok_embeddings.weight", "norm.weight", "output.weight")
    cache = import_module("mistral_inference.cache").BufferCache(LAYERS, 1, 64, c.num_key_value_heads, c.head_dim)

    def call(ids, start):
        if not start:
            cache.reset()
        return model(torch.tensor(ids), [len(ids)], cache=cache)
    return loaded(model, in_pairs(state, c), names), call


# The file by which a checkout is known: what makes the engine, its model's configuration, on how many ranks.
ENGINES = {
    "llms_from_scratch/kv_cache/llama3.py": (raschka("llms_from_scratch.kv_cache.llama3", "weight"), CONFIG, 1),
    "llms_from_scratch/kv_cache/qwen3.py": (raschka("llms_from_scratch.kv_cache.qwen3", "scale"), QWEN3_MOE, 1),
    "reasoning_from_scratch/qwen3.py": (raschka("reasoning_from_scratch.qwen3", "scale"), QWEN3, 1),
    "litgpt/model.py": (litgpt, CONFIG, 1),
    "litgpt/config.py": (litgpt, MIXTRAL, 1),
    "torchtune/models/llama3/__init__.py": (torchtune, CONFIG, 1),
    "llama_models/llama3/model.py": (llama_models, CONFIG, 2),
    "mistral_inference/transformer.py": (mistral, CONFIG, 1),
}


def import_home(marker: str) -> str:
    """The folder on Python's path in which an engine's file stands."""
    return next(folder for folder in sys.path if (Path(folder) / marker).is_file())


# Breaks.

def exchanged(state, a, b):
    for name in [name for name in state if a in name]:
        other = name.replace(a, b)
        state[name], state[other] = state[other], state[name]


def filled(state, part, value):
    for name in state:
        if part in name:
            state[name] = torch.full_like(state[name], value)


def of_layer_1(state, part):
    state[f"model.layers.0.{part}.weight"] = state[f"model.layers.1.{part}.weight"]


BREAKS = {  # the right name, what is changed of the weights, of the configuration, of the model
    "norm_epsilon": (None, {}, lambda model: [setattr(one, "eps", 1e-3) for one in model.modules()
                                              if hasattr(one, "eps")]),
    "rope_default_theta": (None, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, None),
    "norm_weight_missing": (lambda state: filled(state, "post_attention_layernorm", 1.0), {}, None),
    "norm_weight_exchanged": (lambda state: exchanged(state, "input_layernorm", "post_attention_layernorm"), {}, None),
    "wrong_layer": (lambda state: of_layer_1(state, "self_attn.q_proj"), {}, None),
    "gate_up_order": (lambda state: exchanged(state, "gate_proj", "up_proj"), {}, None),
    "qkv_order": (lambda state: exchanged(state, "k_proj", "v_proj"), {}, None),
    "head_rows": (lambda state: state.update({"lm_head.weight": state["lm_head.weight"].roll(1, 0)}), {}, None),
}


def run(engine: Callable, folder: Path, config: dict, ranks: int, to: Path, broken: str = "") -> None:
    """Record an engine with the weights of ``folder``, healthy or with a break."""
    weights, other, change = BREAKS.get(broken, (None, {}, None))

    def on_rank():
        state = dict(load_file(folder / "model.safetensors"))
        if weights:
            weights(state)
        with torch.inference_mode(), record(to, rank=rank(), world_size=ranks) as rec:
            model, call = engine(state, SimpleNamespace(**config | other))
            if change:
                change(model)
            rec.watch(model)
            for number, text in enumerate(TEXTS):
                ends = [len(text) - DECODED + n for n in range(DECODED + 1)]
                for start, end in zip([0, *ends], ends):
                    rec.inputs([text[start:end]], [[*range(start, end)]], [number])
                    call(text[start:end], start)
    logical_ranks(ranks, on_rank)


def main(checkouts: list[str]) -> int:
    sys.meta_path.append(Lacking())
    bad = 0
    for checkout in checkouts:
        known = [(marker, file) for marker in ENGINES for file in sorted(Path(checkout).rglob(marker))[:1]]
        if not known:
            print(f"{checkout}: no engine that this script knows ({', '.join(ENGINES)})", file=sys.stderr)
            return 2
        for marker, file in known:
            sys.path.insert(0, str(file).removesuffix(marker))
            bad += tried(marker)
    return int(bad > 0)


def tried(marker: str) -> int:
    """Check one engine, healthy and with each break; how often something else came out than should."""
    bad, (engine, config, ranks) = 0, ENGINES[marker]
    experts = config["model_type"] in ("mixtral", "qwen3_moe")
    with tempfile.TemporaryDirectory() as place:
        folder = write_random(Path(place, "model"), 3, **config)
        for broken in ("", *(one for one in BREAKS if not experts or one != "gate_up_order")):
            run(engine, folder, config, ranks, Path(place, broken or "healthy"), broken)
            report = check(Path(place, broken or "healthy"), folder)
            names = [one.fault or "no name" for one in report.diagnoses]
            good = report.verdict == ("bug" if broken else "clean") and {*names} <= {broken, "rope_theta"}
            bad += not good
            print(f"{marker}, {ranks} rank{'s' * (ranks > 1)}, {len(report.points)} points, {broken or 'healthy'}: "
                  f"{report.verdict}{': ' * bool(names)}{', '.join(names)}")
            if not good:
                print(f"  <-- {report.summary()}")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else print(__doc__) or 2)
