"""The Knights & Knaves dialogue for verl's ToolAgentLoop: a tool that answers, and a parser of the model's questions.

verl imports this module because ask_tool.yaml names it (`multi_turn.tool_config_path`), and so it finds the parser too
(`multi_turn.format=ask`). A row's statements are in its `tools_kwargs`.
"""

import asyncio
import json
import re
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

_QUESTION = re.compile(r"<ask>\s*(\w+)\s*</ask>")


@ToolParser.register("ask")
class AskParser(ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        found = _QUESTION.search(text)
        return text, [FunctionCall(name="ask", arguments=json.dumps({"name": found[1]}))] if found else []


class AskTool(BaseTool):
    """Each islander says what the row has for it."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._statements: dict[str, dict[str, str]] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or uuid4().hex
        self._statements[instance_id] = kwargs["create_kwargs"]["statements"]
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        await asyncio.sleep(float(self.config["seconds"]))
        return ToolResponse(text=self._statements[instance_id].get(parameters["name"]) or "enough"), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._statements[instance_id]
