"""The checkpoints that count what is read of them, and the cache that is for looking at."""

import copy

import pytest
import torch

from tplab.lesson.contiguous_cache import ContiguousKVCache, append
from tplab.lesson.toy_checkpoint import CountedCheckpoint, ToyCheckpoint, ToySource, toy_model


def test_what_is_read_of_a_toy_is_counted_by_reader_and_by_tensor():
    data = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.float64)}
    toy = ToyCheckpoint(data)
    first, second = toy.reader(), toy.reader()
    assert toy.tensors["b"].shape == (5,) and toy.tensors["b"].dtype == torch.float64
    assert torch.equal(first["a"][1:, :2], data["a"][1:, :2]) and first["b"][:].tolist() == [1] * 5
    second["a"][:]
    assert (first.bytes_read, second.bytes_read, dict(toy.taken)) == (16 + 40, 48, {"a": 16 + 48, "b": 40})
    first["a"][:].zero_()
    assert data["a"].sum() == 66, "a reader gives copies"
    assert copy.deepcopy(toy) is toy, "what is read of a learner's copy counts here"


def test_whoever_opens_a_reader_is_counted():
    toy = ToyCheckpoint({"a": torch.ones(2, 3)}, "the config")
    counted = CountedCheckpoint(toy)
    assert counted.bytes_read == 0 and counted.config == "the config" and counted.tensors is toy.tensors
    for reader in (counted.reader(), copy.deepcopy(counted).reader()):
        reader["a"][:1]
        reader["a"][1:]
    assert counted.bytes_read == 2 * 24
    toy.reader()["a"][:]
    assert counted.bytes_read == 2 * 24 and counted.reader() is not counted.reader()


def test_a_lazy_tensor_of_different_numbers_forgets_what_was_read():
    source = ToySource((2, 3), torch.float64)
    assert source.whole.tolist() == [[1, 2, 3], [4, 5, 6]] and source.whole.dtype == torch.float64
    for _ in range(2):
        assert copy.deepcopy(source)[:, 1:].tolist() == [[2, 3], [5, 6]] and source.taken == 4 * 8
        source.forget()
        assert source.taken == 0
    assert ToySource((1,)).whole.dtype == torch.float32


def test_a_toy_model_has_odd_sizes_biases_and_always_the_same_numbers():
    (toy, plan), (again, _) = toy_model(5, 1, 3), toy_model(5, 1, 3)
    assert (plan.tensor_parallel_size, plan.num_heads, plan.num_kv_heads) == (3, 5, 1)
    shapes = {name: info.shape for name, info in toy.tensors.items()}
    layer = "model.layers.1.self_attn"
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (23, 10)
    assert shapes[f"{layer}.q_proj.weight"] == (20, 10) and shapes[f"{layer}.k_proj.bias"] == (4,)
    assert shapes[f"{layer}.o_proj.weight"] == (10, 20) and shapes[f"{layer}.o_proj.bias"] == (10,)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (10, 13) and not [name for name in shapes if ".2." in name]
    assert not [name for name in shapes if "mlp" in name and "bias" in name or "q_norm" in name]
    assert all(torch.equal(tensor, again.data[name]) for name, tensor in toy.data.items())
    assert len({tensor.flatten()[0].item() for tensor in toy.data.values()}) == len(toy.data)


def test_a_contiguous_cache_grows_by_sequence_and_counts_keys_and_values():
    cache = ContiguousKVCache(2, 3)
    assert cache.nbytes == 0 and cache.computed == [0, 0] and [len(cache.k), len(cache.v)] == [3, 3]
    k, v = torch.arange(24.0).view(4, 2, 3), torch.arange(8.0).view(4, 2, 1)
    context = cache.context([3, 1])
    assert context.lengths == [(3, 3), (1, 1)] and context.positions.tolist() == [0, 1, 2, 0]
    first, second = context.batches(1, k, v)
    assert cache.nbytes == 4 * 2 * (3 + 1) * 4 and cache.computed == [3, 1]
    assert (first[0], second[0]) == (slice(0, 3), slice(3, 4)) and second[1].shape == (1, 2, 1, 3)
    assert torch.equal(first[2][0], v[:3].transpose(0, 1)) and cache.k[0] == [None, None]
    context = cache.context([0, 2])
    (batch,) = context.batches(1, k[:2], v[:2])
    assert context.lengths == [(2, 3)] and context.positions.tolist() == [1, 2] and cache.computed == [3, 3]
    assert batch[3].view(2, 3).tolist() == [[False, False, True], [False, False, False]], "the future alone is hidden"
    assert torch.equal(cache.k[1][1], torch.cat([k[3:], k[:2]]))
    rows = [batch[0] for batch in ContiguousKVCache(4, 1).context([1, 1, 0, 2]).batches(0, k, v)]
    assert rows == [slice(0, 1), slice(1, 2), slice(2, 4)]


@pytest.mark.parametrize("past", [None, torch.zeros(1, 2, 3)])
def test_what_is_appended_stands_behind_the_past_and_is_a_copy(past):
    new = torch.ones(2, 2, 3)
    held = append(past, new)
    new.fill_(5)
    assert held.flatten(1).tolist() == [[0] * 6] * (past is not None) + [[1] * 6] * 2
