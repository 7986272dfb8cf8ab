"""MCP results as text for the model."""

from __future__ import annotations

import json

import mcp_types as types


def result_text(result: types.CallToolResult) -> str:
    """Text items joined by newlines, other items as `[Image: mime]`; structured content as JSON if there is no text."""
    texts: list[str] = []
    notes: list[str] = []
    for item in result.content:
        if isinstance(item, types.TextContent):
            texts.append(item.text)
        elif isinstance(item, types.EmbeddedResource) and isinstance(item.resource, types.TextResourceContents):
            texts.append(item.resource.text)
        else:
            notes.append(_note(item))
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join([*texts, *notes])


def _note(item: types.ImageContent | types.AudioContent | types.ResourceLink | types.EmbeddedResource) -> str:
    if isinstance(item, types.ImageContent):
        return f"[Image: {item.mime_type}]"
    if isinstance(item, types.AudioContent):
        return f"[Audio: {item.mime_type}]"
    uri = item.uri if isinstance(item, types.ResourceLink) else item.resource.uri
    return f"[Resource: {uri}]"
