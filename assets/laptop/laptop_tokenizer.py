r"""The tokenizer of the laptop model: bytes, the words of its little world, and one token per chat or tool tag.

A tiny model learns to copy if copying is an identity map. So a name, an operand and an operator are one token each
wherever they stand (a longer number is cut after every second digit), and so are the fixed parts of a tool call:

    <tool_call> |\n{"name": "| calculator |", "arguments": {"| expression |": "| 37 | * | 24 |"}}\n| </tool_call>

The base vocabulary is the 256 bytes, `ROLE_PIECES`, `CALL_PIECES`, `WORDS` and names; every text is representable and
decodes to itself. Tags are added tokens, outside the base vocabulary: encoding a text without them
(`ChatFormat.encode_text`) can never produce one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
CHAT_TAGS = (PADDING, "<|im_start|>", END_OF_TURN)
TEXT_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
CALL_PIECES = ('\n{"name": "', '", "arguments": {"', '": "', '"}}\n')
ROLE_PIECES = ("system\n", "user\n", "assistant\n")
WORDS = (
    *("Tools", "What", "How", "Put", " is", " many", " has", " plus", " the", " answer", " in", " a", " box"),
    *(" was", " born", " and", " works", " at", " city", " firm", " with", " mayor", " boss", " bridges", " trucks"),
    *(" calculator", " search", "calculator", "expression", "search", "query", "unknown", "boxed"),
    *(f"{number:02d}" for number in range(100)),
)
CONTEXT_LENGTH = 1024

_SPLIT = (
    r"(?:system|user|assistant)\n"
    r'|\n\{"name": "|", "arguments": \{"|": "|"\}\}\n'
    r"| ?[a-z]+|[A-Z][a-z]*|[0-9]{1,2}|\s|[^A-Za-z0-9\s]"
)

# One line per message; `tools` only by name: a JSON schema would be longer than the whole rollout.
CHAT_TEMPLATE = """\
{%- set notes = namespace(text="") -%}
{%- if messages and messages[0].role == "system" -%}
  {%- set notes.text = messages[0].content | trim -%}
{%- endif -%}
{%- if tools -%}
  {%- set names = tools | map(attribute="function.name") | sort | join(", ") -%}
  {%- set notes.text = notes.text + ("\\n" if notes.text else "") + "Tools: " + names -%}
{%- endif -%}
{%- if notes.text -%}
  {{- "<|im_start|>system\\n" + notes.text + "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}
      {{- "<|im_start|>user\\n" -}}
    {%- else -%}
      {{- "\\n" -}}
    {%- endif -%}
    {{- "<tool_response>\\n" + message.content + "\\n</tool_response>" -}}
    {%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}
      {{- "<|im_end|>\\n" -}}
    {%- endif -%}
  {%- elif message.role == "assistant" -%}
    {{- "<|im_start|>assistant\\n" + (message.content or "") -}}
    {%- for call in message.tool_calls or [] -%}
      {{- "\\n" if message.content or not loop.first else "" -}}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {%- set arguments = call.function.arguments -%}
      {{- arguments if arguments is string else arguments | tojson -}}
      {{- "}\\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\\n" -}}
  {%- elif message.role == "user" -%}
    {{- "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""


def build_tokenizer(*, words: Sequence[str], names: Sequence[str]) -> Tokenizer:
    """The tokenizer as an object. Ids: the 256 bytes, then pieces, `words` and `names`, then tags."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = dict.fromkeys([*ROLE_PIECES, *CALL_PIECES, *words, *names])
    base = sorted(pre_tokenizers.ByteLevel.alphabet())
    base += [byte_level.pre_tokenize_str(piece)[0][0] for piece in pieces]
    vocabulary = {token: index for index, token in enumerate(base)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in CHAT_TAGS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TEXT_TAGS])
    return tokenizer


def write_tokenizer(directory: Path, *, words: Sequence[str], names: Sequence[str]) -> Tokenizer:
    """Write what `AutoTokenizer` and `tokenizers` load: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(words=words, names=names)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return tokenizer
