"""Reads what a model directory says about tokens and chat templates. Reads files, nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from agentrl.errors import UnavailableError

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"

_TEMPLATE_FILE = "chat_template.jinja"
_NAMED_TEMPLATES = "additional_chat_templates"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Tokenizer, chat templates by name, special token strings by name, end-of-sequence ids and vocabulary."""

    tokenizer: Tokenizer
    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]
    eos_ids: tuple[int, ...]
    vocab_size: int


def read_model_files(model_dir: Path, *, chat_template: Path | None) -> ModelFiles:
    """Read a `save_pretrained` directory; `chat_template` names a Jinja file that replaces the model's own.

    Raises:
        UnavailableError: the tokenizer or the template is missing or unreadable; the message names the file.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise UnavailableError(f"{path} does not exist: the model directory needs a fast tokenizer (tokenizer.json)")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what tokenizers raises for every unreadable file
        raise UnavailableError(f"{path} is not a readable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(model_dir / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **_read_json(model_dir / "special_tokens_map.json")}
    named_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    _add_configured_tokens(tokenizer, config=config, named_tokens=named_tokens)
    return ModelFiles(
        tokenizer=tokenizer,
        templates=_read_templates(model_dir, config=config, replacement=chat_template),
        named_tokens=named_tokens,
        eos_ids=_read_eos_ids(model_dir, tokenizer=tokenizer, named_tokens=named_tokens),
        vocab_size=_read_vocab_size(model_dir, tokenizer=tokenizer),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object file; absent means empty."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise UnavailableError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnavailableError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnavailableError(f"{path} cannot be read: {error}") from error


def _token_text(token: Any) -> str | None:
    """Special tokens are written as a string or as a serialized AddedToken."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _add_configured_tokens(tokenizer: Tokenizer, *, config: Mapping[str, Any], named_tokens: Mapping[str, str]) -> None:
    """Add what the configuration declares beyond tokenizer.json, in the order that gives the declared ids."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    declared = {int(token_id): token for token_id, token in dict(config.get("added_tokens_decoder") or {}).items()}
    tokens = [
        AddedToken(token["content"], **{name: token[name] for name in _TOKEN_FIELDS if name in token})
        for _, token in sorted(declared.items())
    ]
    texts = known.keys() | {token.content for token in tokens}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    names = [*named_tokens.values(), *(text for token in extra if (text := _token_text(token)) is not None)]
    tokens += [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(names) if text not in texts]
    tokenizer.add_tokens([token for token in tokens if not _same_token(token, known.get(token.content))])


def _same_token(token: AddedToken, other: AddedToken | None) -> bool:
    return other is not None and all(getattr(token, name) == getattr(other, name) for name in _TOKEN_FIELDS)


def _read_templates(model_dir: Path, *, config: Mapping[str, Any], replacement: Path | None) -> dict[str, str]:
    if replacement is not None:
        return {DEFAULT_TEMPLATE: _read_text(replacement)}
    templates: dict[str, str] = {}
    main = model_dir / _TEMPLATE_FILE
    if main.is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(main)
    for path in sorted((model_dir / _NAMED_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    templates = templates or _configured_templates(config.get("chat_template"))
    if not templates:
        raise UnavailableError(
            f"{model_dir} has no chat template: neither {_TEMPLATE_FILE} nor chat_template in tokenizer_config.json; "
            "use an instruction-tuned model or set chat_template to a Jinja file"
        )
    if DEFAULT_TEMPLATE not in templates and TOOL_TEMPLATE not in templates:
        raise UnavailableError(
            f'{model_dir} has the chat templates {sorted(templates)} but no "{DEFAULT_TEMPLATE}"; '
            "set chat_template to the Jinja file to use"
        )
    return templates


def _configured_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, dict):
        return {str(name): text for name, text in value.items() if isinstance(text, str)}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {}


def _read_eos_ids(model_dir: Path, *, tokenizer: Tokenizer, named_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """Ids that end a completion: of the tokenizer, then of generation_config.json and config.json."""
    ids: list[int] = []
    eos_text = named_tokens.get("eos_token")
    if eos_text is not None and (eos_id := tokenizer.token_to_id(eos_text)) is not None:
        ids.append(eos_id)
    config = _read_json(model_dir / "config.json")
    for source in (_read_json(model_dir / "generation_config.json"), config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in ids if tokenizer.id_to_token(int(token)) is not None))


def _read_vocab_size(model_dir: Path, *, tokenizer: Tokenizer) -> int:
    """Ids are below this: the tokenizer's, or the model's where its embedding is padded to more."""
    config = _read_json(model_dir / "config.json")
    sizes = [source.get("vocab_size") for source in (config, config.get("text_config") or {})]
    added_ids = tokenizer.get_added_tokens_decoder().keys()
    highest = max(tokenizer.get_vocab_size(), max(added_ids, default=-1) + 1)
    return max([highest, *(size for size in sizes if isinstance(size, int))])
