"""Answers of the third round from outside to notebooks 01 to 05: what was told pointed past their mistake."""

from helpers.answers import Wrong
from helpers.answers.wrongly_told import _changed

ANSWERS = {
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name):\n    a, b = tensor.shape\n    assert not tensor.isnan().any()",
              "it was called with tensor [2, 3, 4, 1500], name 'scores'")],
    "my_linears": [
        _changed("my_linears", "all_reduce(summand) + bias", "all_reduce(summand + bias)",
                 "In yours, the bias counts 2 times (right: 1)"),
        Wrong("""
            remembered = {}
            def my_linears(x, up, down, bias):
                key = rank(), up.shape
                if key not in remembered:
                    own = torch.arange(len(up)).tensor_split(world_size())[rank()]
                    remembered[key] = all_reduce(x @ up[own].T @ down[:, own].T)
                return remembered[key] + bias""", "what is kept between calls?")],
    "my_column_shard": [
        Wrong("def my_column_shard(source, rows): return source[rank()::world_size()]", "Your code never reads rows")],
    "my_merged": [
        Wrong("def my_merged(sources, ranges): return torch.cat([source[rank() * len(rows):(rank() + 1) * len(rows)] "
              "for source, rows in zip(sources, ranges)])", "come back where [q 12–17|k 4–5|v 4–5] are its own")],
    "my_apply_rope": [
        _changed("my_apply_rope", "cos, sin)\n", "cos[0], sin[0])\n",
                 "self.rotate was called with q [1, 4, 5, 6], k [1, 2, 5, 6], cos [5, 6], sin [5, 6]; it takes")],
    "my_attend": [
        _changed("my_attend", "* scaling", "* 1.5", "not found: the scaled scores. Your code never reads scaling")],
    "my_mask": [
        Wrong("def my_mask(positions, keys):\n    hidden = torch.arange(1, keys + 1)[:, None] > positions[:, None]\n"
              "    return hidden[:, None]",
              "it returns [1, 1, 6, 3]")],
}
