"""The checkpoints that count what is read of them, and small random ones."""

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
