"""``plan`` for published configurations: counts that were made by hand, from the numbers in each config.json."""

import json

import pytest
import torch

from course.cost.amounts import Part, messages, step_amount
from course.cost.cost import step_cost
from course.cost.links import linked_machine
from tplab.checkpoint.config import config_of, without_quantisation
from tplab.cli import main
from tplab.memory import kv_bytes, parameter_bytes
from tplab.shard import ShardPlan

QWEN3_30B_A3B = dict(
    model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], vocab_size=151936, tie_word_embeddings=False,
    max_position_embeddings=40960, rope_theta=1000000.0, use_sliding_window=False, sliding_window=None)
GPT_OSS_120B = dict(
    model_type="gpt_oss", hidden_size=2880, num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8,
    head_dim=64, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088,
    sliding_window=128, attention_bias=True, tie_word_embeddings=False, max_position_embeddings=131072,
    quantization_config={"quant_method": "mxfp4"})
LLAMA_405B = dict(
    model_type="llama", hidden_size=16384, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8,
    intermediate_size=53248, vocab_size=128256, tie_word_embeddings=False, max_position_embeddings=131072,
    rope_theta=500000.0)
# All weights of the model, then of rank 0 of 8, and the bytes of a token's keys and values there: in bfloat16.
COUNTED = [(QWEN3_30B_A3B, 30_532_122_624, 3_840_292_864, 2 * 48 * 1 * 128 * 2),
           (GPT_OSS_120B, 116_829_156_672, 14_627_147_616, 2 * 36 * 1 * 64 * 2),
           (LLAMA_405B, 405_853_388_800, 50_735_300_608, 2 * 126 * 1 * 128 * 2)]
IDS = ["Qwen3-30B-A3B", "gpt-oss-120b", "Llama-3.1-405B"]
BF16 = torch.bfloat16


@pytest.mark.parametrize(("raw", "total", "on_rank_0", "token"), COUNTED, ids=IDS)
def test_parameters_and_keys_and_values_as_counted_by_hand(raw, total, on_rank_0, token):
    config = config_of(without_quantisation(raw))
    whole, eight = (ShardPlan.from_config(config, tp) for tp in (1, 8))
    assert parameter_bytes(config, whole.ranks[0], BF16) == 2 * total
    assert parameter_bytes(config, eight.ranks[0], BF16) == 2 * on_rank_0
    assert kv_bytes(config, eight.ranks[0], 10, BF16) == 10 * token


def test_a_step_reads_the_experts_that_its_tokens_are_sent_to():
    """One token of 30B-A3B on 8 ranks, by hand: 8 experts of 3 * 2048 * 96 numbers, the router, attention, the head."""
    config = config_of(QWEN3_30B_A3B)
    plan = ShardPlan.from_config(config, 8)
    one, many = ([amount.weights for amount in step_amount(config, plan, 0, [Part(9, 1)] * rows, rows, BF16)]
                 for rows in (1, 4096))
    assert one == [2_621_440, 8 * 3 * 2048 * 96 + 262_144] * 48 + [18992 * 2048]
    assert many[1] == 128 * 3 * 2048 * 96 + 262_144  # all of them, once


@pytest.mark.parametrize(("raw", "tp", "numbers", "cached", "collectives"), [
    (QWEN3_30B_A3B, 8, 48 * (2_621_440 + 8 * 3 * 2048 * 96 + 262_144) + 18992 * 2048, 24_576, 2 * 48 + 2),
    (GPT_OSS_120B, 8, 36 * (2880 * 1152 + 4 * 3 * 2880 * 360 + 2880 * 128) + 25136 * 2880, 9_216, 2 * 36 + 2),
    (LLAMA_405B, 16, 126 * (16384 * 2304 + 3 * 16384 * 3328) + 8016 * 16384, 64_512, 2 * 126 + 2)], ids=IDS)
def test_the_bound_on_tokens_per_second_as_counted_by_hand(raw, tp, numbers, cached, collectives):
    """One token after 512: each weight that it needs and each key and value once at 3.35 TB/s, 10 µs for each
    collective, whose bytes are the rest."""
    config = config_of(without_quantisation(raw))
    plan = ShardPlan.from_config(config, tp)
    cost = step_cost(config, plan, [Part(512, 1)], 1, BF16, linked_machine("nvlink", tp, BF16))
    sent = (collectives - 1) * config.hidden_size * 2 * 2 * (tp - 1) / tp / 370e9
    assert cost.total == pytest.approx((2 * numbers + 513 * cached) / 3.35e12 + collectives * 10e-6 + sent, rel=1e-4)


# A Phi-3 type without a window in reach and with all of a head rotated, as published: its end of text is id 32000.
PHI_35_MINI = dict(
    model_type="phi3", hidden_size=3072, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    intermediate_size=8192, vocab_size=32064, rope_theta=10000.0, original_max_position_embeddings=4096,
    rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    max_position_embeddings=131072, sliding_window=262144, tie_word_embeddings=False, eos_token_id=32000)
PHI_4 = dict(
    model_type="phi3", hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=10,
    intermediate_size=17920, vocab_size=100352, rope_theta=250000, rope_scaling=None, sliding_window=None,
    original_max_position_embeddings=16384, max_position_embeddings=16384, tie_word_embeddings=False,
    bos_token_id=100257, eos_token_id=100265, pad_token_id=100349)


@pytest.fixture
def plan(tmp_path, capsys):
    """``plan --config`` of a dictionary on 8 ranks in bfloat16: its exit code, and what it says."""
    def run(raw, *options):
        (tmp_path / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
        code = main(["plan", "--config", str(tmp_path / "config.json"), "--tp", "8", "--dtype", "bfloat16", *options])
        return code, " ".join("".join(capsys.readouterr()).split())

    return run


@pytest.mark.parametrize(("raw", "options", "words"), [
    (QWEN3_30B_A3B, ["--expert-parallel"], ["16 experts (0–15)", "weights 7.7 GB", "24,576 bytes per token",
                                            "of the fast path: it does not support experts"]),
    (GPT_OSS_120B, [], ["published weights are quantised; here they are counted in bfloat16",
                        "columns 0–359 of each of 128 experts", "weights 29.3 GB", "9,216 bytes per token"]),
    (PHI_35_MINI, [], ["weights 955.6 MB", "49,152 bytes per token"]), (PHI_4, [], ["weights 4.1 GB", "uneven"]),
], ids=["30B-A3B", "120b", "Phi-3.5-mini", "Phi-4"])
def test_the_command_tells_it(raw, options, words, plan):
    code, said = plan(raw, *options)
    assert code == 0 and [word for word in words if word not in said] == []


@pytest.mark.parametrize(("raw", "words"), [
    ("[1]", "holds a JSON list"), ({"model_type": "gpt2"}, "'gpt2' is not supported"),
    ({"model_type": "deepseek_v3", "qk_rope_head_dim": None}, "'deepseek_v3' is not supported")])
def test_what_is_no_configuration_is_one_sentence(raw, words, plan):
    code, said = plan(raw)
    assert code == 2 and words in said and "Traceback" not in said


def test_no_file_is_one_sentence(tmp_path, capsys):
    assert main(["plan", "--config", str(tmp_path / "none.json")]) == 2
    assert "none.json is missing" in capsys.readouterr().err


def test_a_norm_over_the_full_width_gathers_q_and_k_in_every_layer():
    sizes = dict(hidden_size=48, intermediate_size=50, num_hidden_layers=3, num_attention_heads=6,
                 num_key_value_heads=2, vocab_size=97, eos_token_id=2)
    full, none = (messages(config_of(dict(model_type=kind, **sizes)), [Part(0, 5)], 1, BF16) for kind in (
        "olmo2", "llama"))
    assert full == none + [5 * 8 * (6 + 2) * 2 // 2] * 3
