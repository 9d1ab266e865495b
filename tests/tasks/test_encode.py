from typing import Any

import pytest

from sortedrl.tasks.encode import encode, prompt_text
from sortedrl.tasks.task import Problem

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
TEMPLATE_WITHOUT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
)


def word_tokenizer(**options: Any) -> Any:
    """A real tokenizer of words that begins a text with <s> and ends it with </s>, as some do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    specials = ["<unk>", "<s>", "</s>", "<system>", "<user>", "<assistant>"]
    words = [*specials, "be", "brief", "what", "is", "it", "really", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(tokens | options))


def test_a_chat_template_is_used_once_and_ends_where_the_response_begins() -> None:
    tokenizer = word_tokenizer(chat_template=TEMPLATE)
    problem = Problem("p", "what is it", 1, system="be brief")
    assert prompt_text(problem, tokenizer) == "<system> be brief <user> what is it <assistant> "
    (prompt,) = encode([problem], tokenizer, max_prompt_tokens=20).prompts
    assert tokenizer.decode(prompt.tokens) == "<system> be brief <user> what is it <assistant>"
    assert prompt.payload is problem and prompt.id == "p"


def test_a_template_that_refuses_a_system_message_gets_it_in_the_question() -> None:
    tokenizer = word_tokenizer(chat_template=TEMPLATE_WITHOUT_SYSTEM)
    text = prompt_text(Problem("p", "what is it", 1, system="be brief"), tokenizer)
    assert text.split() == ["<user>", "be", "brief", "what", "is", "it", "<assistant>"]


def test_without_a_template_the_texts_follow_each_other_and_no_end_token_follows() -> None:
    tokenizer = word_tokenizer()
    (prompt,) = encode([Problem("p", "what is it", 1, system="be brief")], tokenizer, max_prompt_tokens=20).prompts
    assert tokenizer.convert_ids_to_tokens(prompt.tokens) == ["<s>", "be", "brief", "what", "is", "it"]


def test_over_long_prompts_are_left_out_counted_and_the_longest_is_shown() -> None:
    tokenizer = word_tokenizer()
    problems = [
        Problem("short", "what is it", 1),
        Problem("long", "what is it " + "really " * 5, 1),
        Problem("longest", "what is it " + "really " * 9, 1),
    ]
    encoded = encode(problems, tokenizer, max_prompt_tokens=4)
    assert [prompt.id for prompt in encoded.prompts] == ["short"]
    assert [(prompt.id, len(prompt.tokens)) for prompt in encoded.rejected] == [("longest", 13), ("long", 9)]
    notice = encoded.rejection_notice()
    assert notice is not None and notice.startswith("2 of 3 prompts have more than 4 tokens")
    assert "longest" in notice and "13" in notice
    assert encode(problems, tokenizer, max_prompt_tokens=13).rejection_notice() is None


def test_nothing_left_is_an_error_that_names_the_limit_needed() -> None:
    with pytest.raises(ValueError, match="The shortest has 4 tokens"):
        encode([Problem("p", "what is it", 1)], word_tokenizer(), max_prompt_tokens=3)


def test_ids_must_be_unique() -> None:
    with pytest.raises(ValueError, match="two problems have the id 'p'"):
        encode([Problem("p", "what is it", 1)] * 2, word_tokenizer(), max_prompt_tokens=9)
