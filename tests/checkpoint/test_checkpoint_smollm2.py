"""The real model, as fetched: its layout, its tokens, and that it still knows the capital of France."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def test_layout(smollm2):
    c = smollm2.config
    assert (c.model_type, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim) == ("llama", 30, 9, 3, 64)
    assert (c.hidden_size, c.intermediate_size, c.vocab_size, c.tie_word_embeddings) == (576, 1536, 49152, True)
    assert (c.rms_norm_eps, c.hf.rope_parameters["rope_theta"], c.eos_token_ids) == (1e-5, 100000.0, (2,))
    assert len(smollm2.tensors) == 272 and {info.dtype for info in smollm2.tensors.values()} == {torch.float32}
    assert len({info.file for info in smollm2.tensors.values()}) > 1


def test_tokens(smollm2):
    tokenizer = smollm2.tokenizer()
    assert tokenizer.encode("<|im_start|>") == [1] and tokenizer.encode("<|im_end|>") == [2]
    assert len(tokenizer.encode("2024")) == 4
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>assistant\n") and "You are a helpful AI assistant named SmolLM" in prompt
    text = "Naïve café, 東京 🦊\n\tand  spaces."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert AutoTokenizer.from_pretrained(smollm2.folder).encode(prompt) == tokenizer.encode(prompt)


def test_hugging_face_answers_paris(smollm2):
    tokenizer = smollm2.tokenizer()
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(smollm2.folder)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
