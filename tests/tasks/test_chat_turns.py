"""Observations as tokens: the tokens of a dialogue are those of its rendered text, and no response is encoded again."""

import pytest

from chat_tokenizer import CHATML, DROPS_REASONING, NO_TOOL_ROLE, OPENS_REASONING, chat_tokenizer
from sortedrl.tasks.encode import ChatTurns, TemplateRefused

USER = [{"role": "user", "content": "and then?"}]
TOOLS = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]


@pytest.mark.parametrize("messages", [USER, TOOLS], ids=["user", "tools"])
def test_prompt_responses_and_observations_are_the_tokens_of_the_whole_chat(messages: list[dict[str, str]]) -> None:
    tokenizer = chat_tokenizer()
    chat = [{"role": "user", "content": "a question"}]
    tokens = list(
        tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
    )
    for response in ("first <think>x</think>", "second"):
        said = [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        tokens += said + ChatTurns(tokenizer).observation(messages, said)
        chat += [{"role": "assistant", "content": response}, *messages]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens) == whole
    assert tokens == list(tokenizer(whole)["input_ids"])


def test_a_response_without_an_end_token_gets_it_from_the_observation() -> None:
    tokenizer = chat_tokenizer()
    said = list(tokenizer("stopped by a stop string")["input_ids"])
    observation = ChatTurns(tokenizer).observation(USER, said)
    assert tokenizer.decode(observation) == "<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_the_texts_are_on_lines_of_their_own() -> None:
    tokenizer = chat_tokenizer(None)
    assert tokenizer.decode(ChatTurns(tokenizer).observation(USER, [5])) == "\nand then?\n"


@pytest.mark.parametrize("template", [DROPS_REASONING, OPENS_REASONING])
def test_a_template_that_changes_earlier_turns_is_refused(template: str) -> None:
    with pytest.raises(TemplateRefused, match="does not preserve the prefix"):
        ChatTurns(chat_tokenizer(template)).observation(USER, [5])


def test_a_template_that_drops_reasoning_only_before_user_messages_takes_tool_messages() -> None:
    template = CHATML.replace(
        "{{ message.content }}",
        "{% if messages[-1].role == 'user' %}{{ message.content.split('</think>')[-1].lstrip() }}"
        "{% else %}{{ message.content }}{% endif %}",
    )
    turns = ChatTurns(chat_tokenizer(template))
    assert turns.observation(TOOLS, [5])
    with pytest.raises(TemplateRefused):
        turns.observation(USER, [5])


def test_a_template_that_refuses_a_role_is_an_error_with_its_reason() -> None:
    with pytest.raises(TemplateRefused, match="no tools"):
        ChatTurns(chat_tokenizer(NO_TOOL_ROLE)).observation(TOOLS, [5])
