"""A language model whose next token depends on the last one alone, by a table, and a chat template for it.

The generation prompt repeats the last character of the conversation. So the last character of a question or of a tool
result decides what the model says, for example which tool it calls.
"""

import json
import math
import string
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from chat_tokenizer import chat_tokenizer

EOS = "<|im_end|>"
HIDDEN = 256
LIKELY = 20.0  # logit of a likely token; all others have 0

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }};{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{{ messages[-1].content[-1:] }}{% endif %}"
)
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>assistant:.",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
Table = Mapping[str, str | Mapping[str, float]]  # the next token, or their probabilities


def call(name: str, **arguments: Any) -> str:
    """One token: a whole tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def scripted_tokenizer(table: Table, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Characters, and every longer entry of the table as a token of its own."""
    tokenizer = chat_tokenizer(template)
    followers = [name for entry in table.values() for name in ([entry] if isinstance(entry, str) else entry)]
    longer = sorted({name for name in [*table, *followers] if len(name) > 1 and name != EOS})
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in longer])
    tokenizer.response_template = RESPONSES
    return tokenizer


def scripted_model(tokenizer: PreTrainedTokenizerFast, table: Table) -> LlamaForCausalLM:
    """Without a path through attention or MLP, logits are a linear function of the last token's embedding."""
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=None, eos_token_id=eos,
            pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
        )
    )  # fmt: skip
    assert len(tokenizer) <= HIDDEN
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), HIDDEN))
        model.lm_head.weight.zero_()
        for token in string.printable:
            set_next(model, tokenizer, token, EOS)
        for token, entry in table.items():
            set_next(model, tokenizer, token, entry)
    model.config._name_or_path = "scripted"
    return model.eval()


@torch.no_grad()
def set_next(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, token: str, entry: str | Mapping[str, float]
) -> None:
    column = tokenizer.convert_tokens_to_ids(token)
    model.lm_head.weight[:, column] = 0.0
    for name, probability in ({entry: 1.0} if isinstance(entry, str) else entry).items():
        row = tokenizer.convert_tokens_to_ids(name)
        model.lm_head.weight[row, column] = (LIKELY + math.log(probability)) / math.sqrt(HIDDEN)
