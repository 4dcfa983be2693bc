"""Check public engines on a CPU, from their unchanged files: ``python tests/strangers/public_engines.py CHECKOUT …``.

A checkout is the folder of a clone, or of an unpacked wheel, of LLMs-from-scratch, reasoning-from-scratch, litgpt,
torchtune, llama-models or mistral-inference. Each engine gets a small random checkpoint, is recorded while it reads two
texts and decodes some tokens, healthy and with eight breaks, and checked. What an engine imports and this environment
lacks is replaced by something that does nothing; fairscale's layers and xformers' attention, by small ones on logical
ranks. Not part of ``./launch test``: the tests hold none of their code.
"""

import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tplab.align import check
from tplab.checkpoint.random_weights import write_random
from tplab.ranks import all_gather, all_reduce, logical_ranks, rank, world_size
from tplab.record import record

LAYERS = 3
CONFIG = dict(model_type="llama", hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, intermediate_size=96, vocab_size=68, rms_norm_eps=1e-5,
              max_position_embeddings=64, tie_word_embeddings=False,
              rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
QWEN3 = CONFIG | dict(model_type="qwen3", rms_norm_eps=1e-6, head_dim=16)
TEXTS = [[3, 14, 15, 9, 26, 5, 35, 8, 30, 44, 2], [7, 40, 2, 11, 60, 33, 1, 50]]
DECODED = 3


# What an engine imports and this environment lacks.

class _Nothing(type):
    def __getitem__(cls, item):
        return cls

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


def _nothing(name: str) -> type:
    return _Nothing(name, (), {"__init__": lambda self, *args, **options: None,
                               "__call__": lambda self, *args: args[0]})


class _Module(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


class Lacking(MetaPathFinder, Loader):
    """Finds modules that do nothing, for some packages."""

    packages = ("lightning", "lightning_utilities", "tiktoken", "torchao", "simple_parsing", "mistral_common",
                "datasets", "sentencepiece", "omegaconf", "PIL", "kagglehub", "blobfile", "fire", "matplotlib",
                "requests", "torchvision", "torchdata", "jsonargparse", "pandas")

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def provide(name: str, **content) -> None:
    """A module of our own under a name of somebody else's."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        here = sys.modules.setdefault(".".join(parts[:i]), _Module(".".join(parts[:i])))
        if i > 1:
            setattr(sys.modules[".".join(parts[:i - 1])], parts[i - 1], here)
    vars(sys.modules[name]).update(content)


# fairscale's parallel layers, on logical ranks.

class Column(nn.Module):
    def __init__(self, size_in, size_out, bias=False, gather_output=True, init_method=None):
        super().__init__()
        self.weight, self.gather = nn.Parameter(torch.empty(size_out // world_size(), size_in)), gather_output

    def forward(self, x):
        y = F.linear(x, self.weight)
        return all_gather(y) if self.gather else y


class Row(nn.Module):
    def __init__(self, size_in, size_out, bias=False, input_is_parallel=True, init_method=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in // world_size()))

    def forward(self, x):
        return all_reduce(F.linear(x, self.weight))


class Vocabulary(nn.Module):
    def __init__(self, size, width, init_method=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size // world_size(), width))

    def forward(self, ids):
        local = ids - rank() * len(self.weight)
        here = (local >= 0) & (local < len(self.weight))
        return all_reduce(F.embedding(local * here, self.weight) * here[..., None])


# xformers' attention of one text.

class Mask:
    def __init__(self, seen):
        self.seen = seen  # [queries, keys]

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_padding=None, kv_seqlen=None):
        if kv_seqlen is None:
            return cls(torch.ones(q_seqlen[0], q_seqlen[0], dtype=torch.bool).tril())
        return cls(torch.arange(kv_padding)[None] < kv_seqlen[0])

    def make_local_attention(self, size):
        return self


def memory_efficient_attention(q, k, v, mask):
    keys = mask.seen.any(0)  # what was never written may be anything
    q, k, v = (x.transpose(1, 2) for x in (q, k[:, keys], v[:, keys]))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.seen[:, keys]).transpose(1, 2)


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
        model = kind(dict(vocab_size=c.vocab_size, emb_dim=c.hidden_size, n_heads=c.num_attention_heads,
                          n_layers=LAYERS, hidden_dim=c.intermediate_size, n_kv_groups=c.num_key_value_heads,
                          head_dim=c.head_dim, qk_norm=True, rope_base=c.rope_parameters["rope_theta"], rope_freq=None,
                          context_length=64, dtype=torch.float32))
        inner = dict(q="att.W_query.weight", k="att.W_key.weight", v="att.W_value.weight", o="att.out_proj.weight",
                     gate="ff.fc1.weight", up="ff.fc2.weight", down="ff.fc3.weight", norm1=f"norm1.{scale}",
                     norm2=f"norm2.{scale}")
        names = named("trf_blocks.{i}.", inner, "tok_emb.weight", f"final_norm.{scale}", "out_head.weight")
        if kind.__name__ == "Qwen3Model":
            names |= {f"{AT}self_attn.{part}_norm": f"trf_blocks.{{i}}.att.{part}_norm.{scale}" for part in "qk"}
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
    config = import_module("litgpt.config").Config(
        name="small", block_size=64, vocab_size=c.vocab_size, padded_vocab_size=c.vocab_size, n_layer=LAYERS,
        n_head=c.num_attention_heads, n_embd=c.hidden_size, n_query_groups=c.num_key_value_heads, rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", norm_eps=c.rms_norm_eps,
        mlp_class_name="LLaMAMLP", intermediate_size=c.intermediate_size, rope_base=c.rope_parameters["rope_theta"])
    model = import_module("litgpt.model").GPT(config)
    inner = dict(o="attn.proj.weight", gate="mlp.fc_1.weight", up="mlp.fc_2.weight", down="mlp.proj.weight",
                 norm1="norm_1.weight", norm2="norm_2.weight")
    names = named("transformer.h.{i}.", inner, "transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight")
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
    "reasoning_from_scratch/qwen3.py": (raschka("reasoning_from_scratch.qwen3", "scale"), QWEN3, 1),
    "litgpt/model.py": (litgpt, CONFIG, 1),
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
    "norm_epsilon": (None, {}, lambda model: [setattr(one, "eps", 0.1) for one in model.modules()
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
        marker, found = next(((marker, file) for marker in ENGINES for file in sorted(Path(checkout).rglob(marker))),
                             (None, None))
        if found is None:
            print(f"{checkout}: no engine that this script knows ({', '.join(ENGINES)})", file=sys.stderr)
            return 2
        sys.path.insert(0, str(found).removesuffix(marker))
        engine, config, ranks = ENGINES[marker]
        with tempfile.TemporaryDirectory() as place:
            folder = write_random(Path(place, "model"), 3, **config)
            for broken in ("", *BREAKS):
                run(engine, folder, config, ranks, Path(place, broken or "healthy"), broken)
                report = check(Path(place, broken or "healthy"), folder)
                names = [one.fault or "no name" for one in report.diagnoses]
                good = report.verdict == ("bug" if broken else "clean") and {*names} <= {broken, "rope_theta"}
                bad += not good
                print(f"{marker}, {ranks} rank{'s' * (ranks > 1)}, {len(report.points)} points, {broken or 'healthy'}: "
                      f"{report.verdict}{': ' * bool(names)}{', '.join(names)}")
                if not good:
                    print(f"  <-- {report.summary()}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else print(__doc__) or 2)
