"""Messages to tokens for models that the renderers package has no renderer of its own for.

Its fallback decodes earlier responses and encodes them again, so the next prompt may not start with the tokens that
were sampled. This renderer appends the new messages to those tokens.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from renderers import DefaultRendererConfig, Renderer, create_renderer
from renderers.base import RenderedTokens, load_tokenizer
from renderers.default import DefaultRenderer

from sortedrl.tasks.encode import ChatTurns, TemplateRefused


class KeepsTokens(DefaultRenderer):  # type: ignore[misc]
    """Applies the tokenizer's chat template to new messages only."""

    config_class: ClassVar[type[DefaultRendererConfig]] = DefaultRendererConfig

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig | None = None) -> None:
        super().__init__(tokenizer, config)
        self._turns = ChatTurns(tokenizer)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        try:
            observation = self._turns.observation(new_messages, previous_completion_ids)
        except TemplateRefused:
            return None  # all messages are rendered again, and the rollout is rejected if its tokens change
        before = [*previous_prompt_ids, *previous_completion_ids]
        return RenderedTokens(
            token_ids=before + observation,
            message_indices=[-1] * len(before) + [0] * len(observation),
            message_roles=[str(message.get("role", "")) for message in new_messages],
        )


def renderer_settings(model: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `renderer` of verifiers' model client; None leaves the choice to verifiers.

    `options` with a `name` select a renderer of the package. Without one they are for `KeepsTokens`, which is also
    used if the package has no renderer for the model.
    """
    if "name" in options:
        return dict(options)
    if not options and type(create_renderer(load_tokenizer(model))) is not DefaultRenderer:
        return None
    return {"name": "custom", "import_path": f"{__name__}.{KeepsTokens.__name__}", **options}


def renderer_of(model: str, settings: Mapping[str, Any] | None) -> Renderer:
    """The same renderer that verifiers builds in its process."""
    from pydantic import TypeAdapter
    from renderers import RendererConfig

    config = None if settings is None else TypeAdapter(RendererConfig).validate_python(dict(settings))
    return create_renderer(load_tokenizer(model), config)
