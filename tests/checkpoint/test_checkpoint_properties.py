"""Thousands of damaged checkpoints: each is refused, or is still the model it says it is."""

import json

import pytest
from helpers.checkpoints import bounded_memory, make_checkpoint
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tplab.checkpoint import CheckpointError, open_checkpoint

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
SHAPE_FACTS = ("hidden_size", "intermediate_size", "num_layers", "vocab_size", "q_size", "kv_size", "qkv_bias",
               "o_bias")
# derandomize: the same checkpoints every time, so that a red run can be repeated.
thorough = settings(derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def little_memory():
    with bounded_memory():
        yield


class Healthy:
    """A tiny checkpoint whose files can be replaced and put back."""

    def __init__(self, folder):
        make_checkpoint(folder, layers=1, heads=2, kv_heads=1, head_dim=4, hidden=8, inter=5, vocab=263, shards=2)
        self.folder = folder
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.opened = open_checkpoint(folder)

    def open_with(self, changes):
        """The checkpoint opened with some files changed, or None if that was refused by name."""
        for name, content in changes.items():
            (self.folder / name).write_bytes(content)
        try:
            ckpt = open_checkpoint(self.folder)
            with ckpt.reader() as reader:
                assert all(reader[name][:].shape == info.shape for name, info in ckpt.tensors.items())
            return ckpt
        except CheckpointError as error:
            assert str(self.folder) in str(error) and "\n" not in str(error)
            return None
        finally:
            for name in changes:
                (self.folder / name).write_bytes(self.files[name])

    def is_still_itself(self, ckpt):
        same_shapes = {n: i.shape for n, i in ckpt.tensors.items()} == {n: i.shape
                                                                        for n, i in self.opened.tensors.items()}
        return same_shapes and all(getattr(ckpt.config, f) == getattr(self.opened.config, f) for f in SHAPE_FACTS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Healthy(tmp_path_factory.mktemp("plain") / "m")


EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "flip", "flip", "set", "cut", "delete", "insert", "repeat", "zero"]),
              st.one_of(st.floats(0, 1, exclude_max=True), st.floats(0, 0.05)),  # more often near the header
              st.integers(1, 255), st.integers(1, 64)), min_size=1, max_size=3)


@st.composite
def damage(draw):
    """A function from a file's bytes to damaged bytes: one to three cuts, flips, insertions or repetitions."""
    edits = draw(EDITS)

    def apply(content):
        content = bytearray(content)
        for kind, place, value, length in edits:
            at = int(place * len(content))
            if kind == "cut":
                del content[at:]
            elif kind == "delete":
                del content[at : at + length]
            elif kind == "insert":
                content[at:at] = bytes([value]) * length
            elif kind == "repeat":
                content[at:at] = content[at : at + length]
            elif kind == "zero":
                content[at : at + length] = bytes(len(content[at : at + length]))
            elif at < len(content):
                content[at] = content[at] ^ value if kind == "flip" else value
        return bytes(content)

    return apply


FILES = st.sampled_from([*SHARDS, *SHARDS, INDEX, "config.json"])


@settings(thorough, max_examples=500)
@given(file=FILES, damaged=damage())
def test_what_opens_has_the_right_shapes(plain, file, damaged):
    ckpt = plain.open_with({file: damaged(plain.files[file])})
    assert ckpt is None or plain.is_still_itself(ckpt)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 20), st.sampled_from([2**31, -(2**63), 10**15, 10**400]),
              st.floats(), st.text(max_size=5), st.sampled_from(
                  ["qwen2", "llama", "full_attention", "sliding_attention", "default", "yarn", "linear", "float16"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["rope_type", "rope_theta", "factor", "type", "short_factor", "a"]), inner, max_size=4),
    max_leaves=6)
CONFIG_KEYS = (
    "architectures dtype eos_token_id head_dim hidden_act hidden_size intermediate_size layer_types "
    "max_position_embeddings max_window_layers model_type num_attention_heads num_hidden_layers num_key_value_heads "
    "rms_norm_eps rope_parameters sliding_window tie_word_embeddings use_sliding_window vocab_size rope_scaling "
    "torch_dtype per_layer_config attention_bias num_experts partial_rotary_factor max_length "
    "pruned_heads return_dict _attn_implementation self cls args name_or_path").split()


@settings(thorough, max_examples=200)
@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON, min_size=1, max_size=3))
@example(changes={"num_hidden_layers": 10**15})
@example(changes={"head_dim": 10**15})
def test_any_config_is_refused_or_agrees_with_the_weights(plain, changes):
    config = json.loads(plain.files["config.json"]) | changes
    ckpt = plain.open_with({"config.json": json.dumps(config).encode()})
    assert ckpt is None or plain.is_still_itself(ckpt)


@settings(thorough, max_examples=60)
@given(model_type=st.sampled_from(["qwen2", "qwen3", "llama", "mistral"]), groups=st.integers(1, 4),
       kv_heads=st.integers(1, 5), half_head=st.integers(1, 9), width=st.integers(1, 5), inter=st.integers(1, 40),
       vocab=st.integers(3, 50), layers=st.integers(1, 3), shards=st.integers(1, 3),
       flags=st.tuples(*[st.booleans()] * 5))
def test_every_sound_config_opens(
    tmp_path_factory, model_type, groups, kv_heads, half_head, width, inter, vocab, layers, shards, flags
):
    tie, attention_bias, mlp_bias, fused_qkv, fused_gate_up = flags
    heads = groups * kv_heads
    folder = make_checkpoint(
        tmp_path_factory.mktemp("m"), model_type, heads=heads, kv_heads=kv_heads, head_dim=2 * half_head,
        hidden=heads * width, inter=inter, vocab=vocab, layers=layers, shards=shards, tie=tie,
        attention_bias=attention_bias, mlp_bias=mlp_bias, fused_qkv=fused_qkv, fused_gate_up=fused_gate_up)
    config = open_checkpoint(folder).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (heads, kv_heads, 2 * half_head)
    assert (config.hidden_size, config.vocab_size, config.num_layers) == (heads * width, vocab, layers)
