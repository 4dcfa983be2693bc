"""Make ``fable-moe``: ``python -m course.fable.train_moe --out FOLDER`` (under half an hour on two cores).

It is a Qwen3 mixture of experts that begins where ``fable`` ended (sparse upcycling, arXiv:2212.05055). Embeddings,
attention and norms are fable's; each expert begins with a fifth of the columns of fable's MLP, another fifth than its
neighbours', and experts become different because each sees other tokens. Qwen3 normalises q and k, which
fable did not, so that attention has to be learnt again; it takes some hundred steps. Stories, optimizers and rates are
those of :mod:`course.fable.train`.

The weights are kept in bfloat16. The committed ones took 23 minutes with one thread on a busy machine; they name the
right person, animal, colour, place and thing in 99.9 % of 1,401 places of 100 held-out stories
(:func:`course.fable.recall.recall`).
"""

import torch
from transformers import GenerationConfig, Qwen2ForCausalLM, Qwen2Tokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from course.fable import CHECKPOINT
from course.fable.train import BIAS_STD, ROUTER, SEED, Phase, main, train

EXPERTS, TOP_K, COLUMNS = 8, 2, 80
NORM_WEIGHT = 2.0  # of q and k at the beginning: about what their root mean square is in fable
ROUTER_STD = 0.06
PHASES = (Phase(900, 900, warmup=0.02, decay=0.5, long_rows=0.85, emphasis=3.0),)


def new_model(dense: Qwen2ForCausalLM) -> Qwen3MoeForCausalLM:
    """The mixture of experts before training, from the dense model."""
    torch.manual_seed(SEED)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "initializer_range", "rope_parameters",
            "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config = {name: getattr(dense.config, name) for name in kept}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **config, head_dim=config["hidden_size"] // config["num_attention_heads"], num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, moe_intermediate_size=COLUMNS, norm_topk_prob=True, attention_bias=True,
        decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=True, router_aux_loss_coef=0.01))
    weights, dense_weights = model.state_dict(), dense.state_dict()
    for name, weight in weights.items():
        if name in dense_weights:
            weight.copy_(dense_weights[name])
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(NORM_WEIGHT)
        elif name.endswith("o_proj.bias"):
            torch.nn.init.normal_(weight, std=BIAS_STD)
        elif name.endswith(ROUTER):
            torch.nn.init.normal_(weight, std=ROUTER_STD)
    for layer, dense_layer in zip(model.model.layers, dense.model.layers, strict=True):
        upcycle(dense_layer.mlp, layer.mlp.experts)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=config["eos_token_id"],
                                               pad_token_id=config["pad_token_id"])
    return model


@torch.no_grad()
def upcycle(mlp, experts) -> None:
    """Each expert gets some columns of a dense MLP, evenly spaced; the sum of the chosen ones is about as large."""
    columns = mlp.down_proj.weight.shape[1]
    for expert in range(EXPERTS):
        own = (torch.arange(COLUMNS) * columns // COLUMNS + expert) % columns
        experts.gate_up_proj[expert] = torch.cat([mlp.gate_proj.weight[own], mlp.up_proj.weight[own]])
        experts.down_proj[expert] = mlp.down_proj.weight[:, own] * (columns / COLUMNS)


def make() -> tuple:
    """``fable-moe``: the model and its tokenizer, which is fable's."""
    tokenizer = Qwen2Tokenizer.from_pretrained(CHECKPOINT)
    model = train(new_model(Qwen2ForCausalLM.from_pretrained(CHECKPOINT)), tokenizer, PHASES)
    model.config.output_router_logits = False
    return model.bfloat16(), tokenizer


if __name__ == "__main__":
    main(make, "course.fable.train_moe")
