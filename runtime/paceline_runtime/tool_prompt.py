"""Messages as chat templates take them, with tools: for a template that knows none, they are told in the system message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from paceline_runtime.chat_schema import ChatMessage, Function, ToolCall

__all__ = ["template_messages", "template_tools"]

_MANUAL = """# Tools

You may call one or more functions to assist with the user query. Their signatures are within <tools></tools>:
<tools>
{signatures}
</tools>

For each function call, return a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # what Qwen's and Hermes' own templates say


def template_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Return tools as templates print them: without what was left out."""
    return [{"type": "function", "function": function.model_dump(exclude_none=True)} for function in functions]


def template_messages(
    messages: Sequence[ChatMessage], functions: Sequence[Function], *, template_knows_tools: bool
) -> list[dict[str, Any]]:
    """Return the messages for a chat template; `developer` is the newer name of `system`."""
    if template_knows_tools:
        return [_native(message) for message in messages]
    told = [_plain(message) for message in messages]
    if not functions:
        return told
    manual = _MANUAL.format(signatures="\n".join(json.dumps(tool) for tool in template_tools(functions)))
    if told[0]["role"] == "system":
        return [{"role": "system", "content": f"{told[0]['content']}\n\n{manual}"}, *told[1:]]
    return [{"role": "system", "content": manual}, *told]


def _role(message: ChatMessage) -> str:
    return "system" if message.role == "developer" else message.role


def _native(message: ChatMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message), "content": message.text}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        functions = [{"name": c.function.name, "arguments": _arguments(c)} for c in message.tool_calls]
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(message.tool_calls, functions, strict=True)
        ]
    return turn


def _plain(message: ChatMessage) -> dict[str, str]:
    """Return a message in the roles that every template knows."""
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.text}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps({'name': c.function.name, 'arguments': _arguments(c)})}\n</tool_call>"
        for c in message.tool_calls or ()
    ]
    return {"role": _role(message), "content": "\n".join(filter(None, [message.text, *calls]))}


def _arguments(call: ToolCall) -> Any:
    """Return arguments as the object that templates print; a text that isn't JSON stays as it is."""
    try:
        return from_json(call.function.arguments)  # which takes no deeper nesting than bodies may have
    except ValueError:
        return call.function.arguments
