"""A tokenizer with one token per character and a chat template in ChatML, which shows tools."""

import string

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_REASONING = CHATML.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1].lstrip() }}")
OPENS_REASONING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
NO_TOOL_ROLE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}" + CHATML
)


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *string.printable])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
