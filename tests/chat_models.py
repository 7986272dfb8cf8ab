"""Small model directories for chat tests: a byte-level BPE trained on a few lines and a template of data/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_TEMPLATES = Path(__file__).parent / "data" / "templates"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = (
    "the quick brown fox searches the web for an answer and then it thinks again about the question",
    '{"name": "search", "arguments": {"query": "capital of France"}} {"name": "add", "arguments": {"a": 1, "b": 2}}',
    "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think> <|im_start|>user <|im_end|>",
    "system user assistant tool ipython function description parameters type object properties string integer",
    "x < y and y > z; a <= b; if (a < b) { return a | b; } // naïve café – 東京 🙂",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModelKind:
    """One template and the control tokens it writes."""

    template: str
    special: tuple[str, ...]
    markup: tuple[str, ...]
    eos: str
    bos: str | None = None
    generation_eos: tuple[str, ...] = ()
    tool_call_parser: str = "hermes"


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_HEADERS = ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end|>")
_BRACKETS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULT]", "[/RESULT]")

KINDS: dict[str, ChatModelKind] = {
    "thinking": ChatModelKind(
        template="thinking",
        special=_CHATML,
        markup=_TAGS,
        eos="<|im_end|>",
        generation_eos=("<|im_end|>", "<|endoftext|>"),
    ),
    "headers": ChatModelKind(
        template="headers",
        special=_HEADERS,
        markup=(),
        eos="<|eot_id|>",
        bos="<|begin|>",
        generation_eos=("<|end|>", "<|eom_id|>", "<|eot_id|>"),
        tool_call_parser="llama3",
    ),
    "hermes": ChatModelKind(template="hermes", special=_CHATML, markup=_TAGS[:2], eos="<|im_end|>"),
    "strict": ChatModelKind(template="strict", special=_BRACKETS, markup=(), eos="</s>", bos="<s>"),
}


@cache
def _trained(special: Sequence[str], markup: Sequence[str]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([*_CORPUS] * 4, trainer=trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in markup])
    return tokenizer.to_str()


def write_chat_model(directory: Path, kind: ChatModelKind) -> Path:
    """Write what `ChatFormat.load` and `AutoTokenizer` read; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    serialized = _trained(kind.special, kind.markup)
    tokenizer = Tokenizer.from_str(serialized)
    (directory / "tokenizer.json").write_text(serialized, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": kind.eos, "pad_token": kind.special[0]}
    if kind.bos is not None:
        settings["bos_token"] = kind.bos
    _write_json(directory / "tokenizer_config.json", settings)
    template = (_TEMPLATES / f"{kind.template}.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    if kind.generation_eos:
        ids = [tokenizer.token_to_id(text) for text in kind.generation_eos]
        _write_json(directory / "generation_config.json", {"eos_token_id": ids})
    return directory


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
