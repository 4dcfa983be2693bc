"""From a Hugging Face checkpoint to the layers of this rank."""

from pathlib import Path

from safetensors.torch import load_file
from transformers import AutoModel
from transformers.utils import logging

logging.disable_progress_bar()


def load_state_dict(folder):
    """{name: tensor} of the whole checkpoint."""
    single = Path(folder) / "model.safetensors"
    if single.exists():
        return load_file(single)
    # Several files, or an older format: transformers can read them all.
    return AutoModel.from_pretrained(folder).state_dict()


def load_weights(model, folder):
    """Fill the model. Weights are sharded during loading."""
    model.state_dict_on_rank = load_state_dict(folder)
    for name, tensor in model.state_dict_on_rank.items():
        load_one(model, name, tensor)


def load_one(model, name, tensor):
    """Give one tensor of the checkpoint to the layer that wants it."""
    path, kind = name.removeprefix("model.").rsplit(".", 1)
    shard_id = None
    if path.endswith((".q_proj", ".k_proj", ".v_proj")):
        path, shard_id = path[:-6] + "qkv_proj", path[-6]
    module = model.get_submodule(path)
    param = getattr(module, kind)
    if hasattr(module, "weight_loader"):
        module.weight_loader(param, tensor, shard_id)
    else:
        param.data.copy_(tensor)
