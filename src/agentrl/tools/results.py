"""MCP results as text for the model, and as they are for whoever passes them on."""

from __future__ import annotations

import json
from typing import Any

import mcp_types as types


def result_text(result: types.CallToolResult) -> str:
    """All items in order, joined by newlines; structured content as JSON only where no item is text.

    Text is taken as it is; anything else is named, like `[Image: image/png]`.
    """
    parts = [_item_text(item) for item in result.content]
    if result.structured_content is not None and not any(_is_text(item) for item in result.content):
        parts.insert(0, json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def content_items(result: types.CallToolResult) -> tuple[dict[str, Any], ...]:
    """The items as JSON; none where there is nothing but one text, which `result_text` gives whole."""
    match result.content:
        case [] | [types.TextContent()]:
            return ()
    return tuple(item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in result.content)


def _is_text(item: types.ContentBlock) -> bool:
    return isinstance(item, types.TextContent) or (
        isinstance(item, types.EmbeddedResource) and isinstance(item.resource, types.TextResourceContents)
    )


def _item_text(item: types.ContentBlock) -> str:
    if isinstance(item, types.TextContent):
        return item.text
    if isinstance(item, types.ImageContent):
        return f"[Image: {item.mime_type}]"
    if isinstance(item, types.AudioContent):
        return f"[Audio: {item.mime_type}]"
    if isinstance(item, types.ResourceLink):
        return f"[Resource: {item.uri}]"
    if isinstance(item.resource, types.TextResourceContents):
        return item.resource.text
    return f"[Resource: {item.resource.uri}]"
