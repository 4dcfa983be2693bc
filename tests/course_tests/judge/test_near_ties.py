"""An engine reads another run's text: a row for each token of it, and no row follows other tokens."""

import torch

from course.judge.answers import greedy
from course.judge.near_ties import read_again
from tplab.checkpoint import open_checkpoint


def test_the_rows_are_those_from_which_the_texts_were_chosen():
    ckpt, prompts = open_checkpoint("fable"), [list(range(5, 12)), list(range(20, 24))]
    texts = greedy(ckpt, prompts, 5, 1, logical=True)
    ours, hugging_face = read_again(ckpt, prompts, texts, 1, "float32")
    assert ours.shape == hugging_face.shape == (10, ckpt.config.vocab_size)
    assert ours.argmax(-1).tolist() == hugging_face.argmax(-1).tolist() == sum(texts, [])
    torch.testing.assert_close(ours, hugging_face, atol=1e-3, rtol=0)
