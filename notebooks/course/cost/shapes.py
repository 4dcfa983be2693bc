"""The shapes of real models, without their weights: to plan for."""

from tplab.checkpoint import ModelConfig

SHAPES = {
    "mistral-7b": dict(
        model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=32768, tie_word_embeddings=False, sliding_window=None,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "llama-3.1-70b": dict(
        model_type="llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, tie_word_embeddings=False,
        max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
}


def shape_config(name: str) -> ModelConfig:
    """The sizes of the model ``name`` of ``SHAPES``."""
    from transformers import AutoConfig

    return ModelConfig.from_hf(AutoConfig.for_model(**SHAPES[name]))
