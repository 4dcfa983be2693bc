"""The checkpoints that count what is read of them, and small random ones."""


import pytest
import torch

from course.judge.toy_checkpoint import CountedCheckpoint, toy_model

NORM = "model.norm.weight"


def test_what_is_read_is_counted_by_tensor_whoever_opens_a_reader():
    toy = toy_model(9, 3, 2, True)
    counted = CountedCheckpoint(toy)
    assert not counted.taken and counted.config is toy.config and counted.tensors is toy.tensors
    for opened in (counted.reader(), counted.reader()):
        with opened as reader:
            reader[NORM][:5]
            reader["lm_head.weight"][1:3, :4]
    assert dict(counted.taken) == {NORM: 2 * 20, "lm_head.weight": 2 * 32} and counted.taken.total() == 104
    with toy.reader() as reader:
        reader[NORM][:]
    assert counted.taken.total() == 104, "what others read is theirs"


def test_a_slice_of_it_is_a_tensor_of_its_own():
    with CountedCheckpoint(toy_model(9, 3, 2, True)).reader() as reader:
        piece = reader["lm_head.weight"][:, 3:5]
        assert piece.untyped_storage().nbytes() == piece.nbytes
        piece.zero_()
        assert reader["lm_head.weight"][:, 3:5].any()


@pytest.mark.parametrize("o_bias", [False, True])
def test_a_toy_model_has_odd_sizes_biases_and_always_the_same_numbers(o_bias):
    toy, hidden = toy_model(9, 3, 2, o_bias), 72 if o_bias else 20
    shapes = {name: info.shape for name, info in toy.tensors.items()}
    layer = "model.layers.1.self_attn"
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (43, hidden)
    assert shapes[f"{layer}.q_proj.weight"] == (54, hidden) and shapes[f"{layer}.k_proj.bias"] == (18,)
    assert shapes[f"{layer}.o_proj.weight"] == (hidden, 54) and (f"{layer}.o_proj.bias" in shapes) == o_bias
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (hidden, 25) and not [n for n in shapes if ".2." in n]
    with toy.reader() as one, toy_model.__wrapped__(9, 3, 2, o_bias).reader() as other:
        tensors = [one[name][:] for name in shapes]
        assert all(torch.equal(tensor, other[name][:]) for name, tensor in zip(shapes, tensors))
    assert len({tensor.flatten()[0].item() for tensor in tensors}) == len(shapes)
