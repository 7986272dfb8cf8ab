import mcp_types as types

from agentrl.tools.results import content_items, result_text


def text(value):
    return types.TextContent(type="text", text=value)


def test_items_that_are_no_text_are_named():
    resource = types.TextResourceContents(uri="note://1", text="a note")
    blob = types.BlobResourceContents(uri="blob://1", blob="aGk=")
    content = [
        text("one"),
        types.ImageContent(type="image", data="aGk=", mime_type="image/png"),
        types.AudioContent(type="audio", data="aGk=", mime_type="audio/wav"),
        types.EmbeddedResource(type="resource", resource=resource),
        types.EmbeddedResource(type="resource", resource=blob),
        types.ResourceLink(type="resource_link", name="x", uri="https://example.org/x"),
        text("two"),
    ]
    assert result_text(types.CallToolResult(content=content)).split("\n") == [
        "one",
        "[Image: image/png]",
        "[Audio: audio/wav]",
        "a note",
        "[Resource: blob://1]",
        "[Resource: https://example.org/x]",
        "two",
    ]


def test_items_are_kept_where_one_text_does_not_say_all():
    image = types.ImageContent(type="image", data="aGk=", mime_type="image/png")
    shown = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    assert content_items(types.CallToolResult(content=[image])) == (shown,)
    assert content_items(types.CallToolResult(content=[text("a"), image]))[1] == shown
    assert content_items(types.CallToolResult(content=[text("a")])) == ()
    assert content_items(types.CallToolResult(content=[])) == ()


def test_structured_content_is_used_only_where_there_is_no_text():
    structured = {"result": "é"}
    assert result_text(types.CallToolResult(content=[text("hi")], structured_content=structured)) == "hi"
    assert result_text(types.CallToolResult(content=[], structured_content=structured)) == '{"result": "é"}'
    assert result_text(types.CallToolResult(content=[])) == ""
