"""Reads the files that users write by hand, YAML and JSON, as plain values.

What the libraries let pass is refused here: keys that are given twice (the first would be dropped in silence), and
aliases that unfold to more than anybody writes. Messages say where, and quote nothing but keys: files hold secrets.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

MAX_NODES = 1_000_000  # values of one file, each alias counted as often as it unfolds


class DocumentError(ValueError):
    """The file is no document; the message says why, as the end of a sentence that names the file."""


def read_document(path: Path, *, form: Literal["json", "yaml"] = "yaml") -> Any:
    """The value of a file; None for empty YAML. Raises OSError, DocumentError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError(f"not valid {form.upper()}: no text in UTF-8") from None
    try:
        return _parse_json(text) if form == "json" else _parse_yaml(text)
    except RecursionError:
        raise DocumentError(f"not valid {form.upper()}: it is nested too deeply") from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise DocumentError(f"not valid JSON in line {error.lineno} ({error.msg})") from None
    except DocumentError:
        raise
    except ValueError:
        raise DocumentError("not valid JSON: a number has too many digits") from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentError(f"{twice!r} is given twice")
    return fields


def _parse_yaml(text: str) -> Any:
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _num_nodes(node, known={})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise DocumentError(f"not valid YAML{where} ({error.problem})") from None
    except yaml.YAMLError as error:  # a character that no YAML has
        raise DocumentError(f"not valid YAML ({' '.join(str(error).split())})") from None
    except DocumentError:
        raise
    except (ValueError, KeyError, AttributeError):  # how PyYAML fails at values that it takes for dates and the like
        raise DocumentError(
            "not valid YAML: an impossible date, number or truth value; quote it if it is text"
        ) from None


def _num_nodes(node: yaml.Node, *, known: dict[int, int | None]) -> int:
    """Values under `node`, unfolded. Raises DocumentError for too many, for endless ones and for keys given twice."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise DocumentError(f"the alias in line {node.start_mark.line + 1} contains itself")
        return size
    known[id(node)] = None
    children = [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_num_nodes(child, known=known) for child in children)
    if size > MAX_NODES:
        raise DocumentError(f"its aliases unfold to more than {MAX_NODES} values")
    known[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[Hashable] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                raise DocumentError(f"{key.value!r} is given twice, again in line {key.start_mark.line + 1}")
            seen.add((key.tag, key.value))
