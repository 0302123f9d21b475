"""A tiny random Llama with a real tokenizer: byte-level BPE, special tokens and a chat template that knows tools."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from model_harness import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

SPECIALS = ("<|im_start|>", "<|im_end|>")
EOS = 1
# enough for some hundred merges; other scripts stay single bytes, so that tokens end inside characters
CORPUS = (
    "The quick brown fox jumps over the lazy dog. A request waits in the queue until the step has room for its tokens. "
    'The model calls a tool: {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} and waits. '
) * 4
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def save_chat_model(folder: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    """Write the model to `folder` and return it as `transformers` runs it. Its vocabulary is padded by four."""
    tokenizer = make_tokenizer()
    model = tiny_llama(seed=3, vocab_size=tokenizer.get_vocab_size() + 4, eos_token_id=EOS, max_position_embeddings=1024)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIALS[EOS], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model, tokenizer


def logprobs_of(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities [T, vocab] of what follows each token."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)
