"""llama.cpp as a contestant: the file that is made for it, what it is asked, and what its side does with it."""

import ctypes
import json
import os
import sys
from enum import Enum
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from helpers.checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from course.cost import BenchError, bench, gguf_file, llama_side
from course.cost.peers import LlamaCpp, Timing, Work
from course.cost.processes import PeerError
from tplab.model.rope import rotate

WORDS = 50


class Recorded:
    """In place of gguf's writer: what it was given."""

    def __init__(self, path, architecture):
        self.path, self.architecture, self.given, self.tensors = path, architecture, {}, {}
        Recorded.last = self

    def __getattr__(self, name):
        return lambda *given: self.given.update({name: given})

    def add_tensor(self, name, values, raw_dtype=None):
        assert name not in self.tensors
        self.tensors[name] = (raw_dtype, values)


class Names:
    """Checkpoint's names are kept, with a sign that they were asked for."""

    def get_name(self, stem):
        return f"<{stem}>"


class Kind(Enum):
    """Architectures that gguf knows."""

    LLAMA, QWEN2, QWEN3 = "llama", "qwen2", "qwen3"


@pytest.fixture
def gguf(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(
        GGUFWriter=Recorded, MODEL_ARCH=Kind, MODEL_ARCH_NAMES={kind: kind.value for kind in Kind},
        get_tensor_name_map=lambda kind, blocks: Names(), GGMLQuantizationType=SimpleNamespace(BF16="bf16")))


@pytest.mark.parametrize("family, architecture", [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [True, False])
def test_every_weight_is_written_once_and_what_the_model_is(tmp_path, gguf, family, architecture, dtype, tie):
    folder = make_checkpoint(tmp_path / "m", family, tie=tie)
    gguf_file.write_gguf(str(folder), "there", dtype)
    written = Recorded.last
    config = json.loads((folder / "config.json").read_text())
    assert (written.path, written.architecture) == ("there", architecture)
    for told, name in (("head_count", "num_attention_heads"), ("head_count_kv", "num_key_value_heads"),
                       ("block_count", "num_hidden_layers"), ("embedding_length", "hidden_size"),
                       ("feed_forward_length", "intermediate_size"), ("vocab_size", "vocab_size"),
                       ("layer_norm_rms_eps", "rms_norm_eps"), ("context_length", "max_position_embeddings")):
        assert written.given[f"add_{told}"] == (config[name],)
    assert written.given["add_rope_freq_base"] == ((config.get("rope_parameters") or config)["rope_theta"],)
    assert list(written.given)[-4:] == ["write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file",
                                        "close"]
    stored = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    if tie:
        stored.pop("lm_head.weight", None)
    assert set(written.tensors) == {f"<{name.rpartition('.')[0]}>.{name.rpartition('.')[2]}" for name in stored}
    for name, value in stored.items():
        stem, _, ending = name.rpartition(".")
        kind, values = written.tensors[f"<{stem}>.{ending}"]
        if family == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            value = torch.from_numpy(gguf_file.in_pairs(value.float().numpy(), heads))
        if dtype == "bfloat16" and value.ndim == 2:
            assert kind == "bf16" and values.dtype == np.uint8
            assert torch.equal(torch.from_numpy(values).view(torch.bfloat16), value.bfloat16())
        else:
            assert kind is None and values.dtype == np.float32 and torch.equal(torch.from_numpy(values), value.float())


@pytest.mark.parametrize("change, why", [
    ({"model_type": "gpt2"}, "for gpt2"), ({"rope_scaling": {"rope_type": "llama3"}}, "scaled RoPE"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "scaled RoPE"),
    ({"use_sliding_window": True}, "sliding window"), ({"tie_word_embeddings": False}, "the tensor lm_head.weight")])
def test_what_llama_cpp_would_compute_otherwise_is_not_written(tmp_path, gguf, change, why, monkeypatch):
    monkeypatch.setattr(Names, "get_name", lambda self, stem: None)
    folder = make_checkpoint(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(NotImplementedError, match=why):
        gguf_file.write_gguf(str(folder), "there", "float32")


def test_pairs_turned_together_stand_together():
    """A row of q turned as halves by Hugging Face, then paired, is the paired row turned pair by pair."""
    heads, size = 3, 8
    weight, x = torch.randn(heads * size, 5), torch.randn(5)
    angle = torch.rand(size // 2)
    cos, sin = (f(angle).repeat(2)[None, None] for f in (torch.cos, torch.sin))
    q = (weight @ x).view(1, heads, 1, size)
    turned, _ = rotate("llama")(q, q, cos, sin)
    paired = (torch.from_numpy(gguf_file.in_pairs(weight.numpy(), heads)) @ x).view(heads, size // 2, 2)
    a, b = paired.unbind(-1)
    theirs = torch.stack([a * cos[0, 0, :4] - b * sin[0, 0, :4], b * cos[0, 0, :4] + a * sin[0, 0, :4]], -1)
    ours = torch.from_numpy(gguf_file.in_pairs(turned.reshape(heads * size, 1).numpy(), heads)).view(heads, 4, 2)
    torch.testing.assert_close(theirs, ours)
    assert gguf_file.in_pairs(np.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7], "a bias too"


def test_numbers_are_read_and_rounded_as_torch_does(tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = {kind: torch.randn(3, 40, generator=generator).to(kind)
              for kind in (torch.float32, torch.float16, torch.bfloat16)}
    save_file({"a": values[torch.float32], "b": values[torch.float16]}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({"c": values[torch.bfloat16]}, tmp_path / "2.safetensors")
    read = dict(gguf_file.tensors(tmp_path))
    for name, value in zip("abc", values.values()):
        assert torch.equal(torch.from_numpy(read[name]), value.float())
    ties = torch.tensor([[1.00390625, 1.01171875, -1.00390625, 3e38, 1e-40, 0.0]])
    for value in (values[torch.float32], ties):
        found = torch.from_numpy(gguf_file.to_bfloat16(value.numpy())).view(torch.bfloat16)
        assert torch.equal(found, value.bfloat16())


class Api:
    """In place of llama_cpp: a next token is the sum of all tokens of its sequence that are in memory."""

    GGML_TYPE_F32 = 0
    llama_backend_init = llama_model_default_params = staticmethod(lambda: None)
    llama_model_load_from_file = staticmethod(lambda file, params: file)
    llama_get_memory = llama_model_get_vocab = staticmethod(lambda whose: whose)
    llama_vocab_n_tokens = staticmethod(lambda vocab: WORDS)

    def __init__(self):
        self.memory, self.steps, self.removed = {}, [], []

    def llama_context_default_params(self):
        return SimpleNamespace(type_k=1, type_v=1)

    def llama_init_from_model(self, model, params):
        self.params = params
        return self

    def llama_batch_init(self, tokens, embedding, sequences):
        return SimpleNamespace(token=[0] * tokens, pos=[0] * tokens, logits=[0] * tokens, n_seq_id=[0] * tokens,
                               seq_id=[[0] * sequences for _ in range(tokens)])

    def llama_memory_clear(self, memory, data):
        self.memory = {}

    def llama_memory_seq_rm(self, memory, number, first, last):
        self.removed.append((number, len(self.memory.pop(number))))

    def llama_decode(self, context, batch):
        self.steps.append(batch.n_tokens)
        self.logits = []
        for i in range(batch.n_tokens):
            assert batch.n_seq_id[i] == 1
            tokens = self.memory.setdefault(batch.seq_id[i][0], [])
            assert batch.pos[i] == len(tokens), "in order, none left out"
            tokens.append(batch.token[i])
            self.logits.append(sum(tokens) % WORDS if batch.logits[i] else None)
        return batch.n_tokens > self.params.n_batch

    def llama_get_logits_ith(self, context, i):
        row = (ctypes.c_float * WORDS)()
        row[self.logits[i]] = 1.0
        return ctypes.cast(row, ctypes.POINTER(ctypes.c_float))


def expected(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % WORDS)
    return tokens[len(prompt):]


@pytest.mark.parametrize("dtype, kinds", [("float32", (0, 0)), ("bfloat16", (1, 1))])
def test_its_side_reads_prompts_in_chunks_beside_decoding_sequences(dtype, kinds):
    api = Api()
    llama = llama_side.Llama(api, "m.gguf", dtype, 2000, 3, 2)
    assert (api.params.n_ctx, api.params.n_seq_max, api.params.n_threads, api.params.n_threads_batch) == (2000, 3, 2, 2)
    assert (api.params.type_k, api.params.type_v) == kinds and api.params.kv_unified
    prompts, counts = [[1, 2, 3], [4] * 700, [5, 6]], [4, 1, 3]
    for _ in range(2):
        api.steps.clear(), api.removed.clear()
        answer = llama.run(prompts, counts)
        assert answer["tokens"] == [expected(*pair) for pair in zip(prompts, counts)]
        assert 0 < answer["first"] <= answer["total"]
        assert api.steps == [3 + 509, 1 + 191 + 2, 2, 2]
        assert api.removed == [(1, 700), (0, 6), (2, 4)] and not api.memory


def test_its_side_says_so_where_a_step_fails():
    llama = llama_side.Llama(Api(), "m.gguf", "float32", 9, 1, 1)
    llama.context.params.n_batch = 1
    with pytest.raises(RuntimeError, match="llama_decode fails on 2 tokens"):
        llama.run([[1, 2]], [1])


def test_its_side_says_so_where_there_is_no_model(monkeypatch):
    monkeypatch.setattr(Api, "llama_model_load_from_file", staticmethod(lambda file, params: None))
    with pytest.raises(RuntimeError, match="makes nothing of m.gguf"):
        llama_side.Llama(Api(), "m.gguf", "float32", 9, 1, 1)


def test_its_side_answers_each_line(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setitem(sys.modules, "llama_cpp", api := Api())
    api.__version__ = "9.9"
    monkeypatch.setattr(sys, "stdin", [json.dumps({"prompts": [[1, 2]], "new_tokens": [3]})] * 2)
    llama_side.main(str(write), "m.gguf", "float32", "9", "1", "2")
    with open(read) as said:
        ready, *answers = map(json.loads, said)
    assert ready == {"ready": "9.9"} and [answer["tokens"] for answer in answers] == [[[3, 6, 12]]] * 2


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """In place of both: a file with what it was told, and its contents as the version."""
    write, answer = tmp_path / "write.py", tmp_path / "answer.py"
    write.write_text("import json, sys; open(sys.argv[2], 'w').write(json.dumps([sys.argv[1], sys.argv[3]]))")
    answer.write_text("""
import json, os, sys
out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
print(json.dumps({"ready": [json.load(open(sys.argv[2])), *sys.argv[3:]]}), file=out)
for line in sys.stdin:
    print(json.dumps({"first": 0.5, "total": 2.0, "tokens": json.loads(line)["prompts"]}), file=out)
""")
    monkeypatch.setattr(gguf_file, "__file__", str(write))
    monkeypatch.setattr(llama_side, "__file__", str(answer))
    return write


def test_it_is_given_the_file_and_room_for_the_work(scripts):
    work = Work([[5, 6], [7]], [3, 4])
    peer = LlamaCpp(SimpleNamespace(folder="folder"), 2, "bfloat16", work, python=sys.executable)
    try:
        assert peer.version == [["folder", "bfloat16"], "bfloat16", "10", "2", "2"]
        assert peer.name == "llama.cpp, 2 threads"
        assert peer.time(work) == Timing(0.5, 2.0, [[5, 6], [7]])
        (pid,) = peer.pids
    finally:
        peer.close()
    assert not psutil.pid_exists(pid)


def test_where_no_file_can_be_made_it_is_said_why(scripts):
    scripts.write_text("raise NotImplementedError('no GGUF is written here for gpt2')")
    with pytest.raises(PeerError, match="no GGUF of the checkpoint: NotImplementedError: .* for gpt2"):
        LlamaCpp(SimpleNamespace(folder="folder"), 2, "float32", Work([[1]], [1]), python=sys.executable)


def test_a_shared_prefix_is_no_race_for_it():
    with pytest.raises(BenchError, match="decode, prefill, batch, long"):
        bench("prefix", "fable", llama_cpp=sys.executable)
    with pytest.raises(BenchError, match="--llama-cpp takes the Python of llama.cpp's environment; 'no/python'"):
        bench("decode", "fable", llama_cpp="no/python")
    with pytest.raises(BenchError, match="load has no peers"):
        bench("load", "fable", llama_cpp=sys.executable)
