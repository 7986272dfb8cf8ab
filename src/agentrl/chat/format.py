r"""Conversations to token ids and back, token-exact, for the rollout loop.

    prompt_ids     = render_prompt(messages, tools=tools)                  <|im_start|>user ... <|im_start|>assistant
    completion_ids = what the engine sampled                               I will search ... <|im_end|>
    prompt_ids     = render_continuation(results, completion_ids=...)      \n<|im_start|>tool ... <|im_start|>assistant

The model's context is the concatenation. Sampled ids are never decoded and encoded again, and earlier turns are never
rendered again, even where the chat template would rewrite them (strip thinking). Text inside messages never becomes a
control token, see `guard`. Neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl.chat.described import check_template_agrees, explain_tools, results_as_user
from agentrl.chat.formats import CallFormat, get_call_format
from agentrl.chat.guard import Guard, GuardedEncoder, SentinelClashError
from agentrl.chat.loading import DEFAULT_TEMPLATE, TOOL_TEMPLATE, ModelFiles, read_model_files
from agentrl.chat.parser import ParsedCompletion, parse_completion
from agentrl.chat.template import ChatTemplate, ToolEntry, normalize_message
from agentrl.errors import ConfigError
from agentrl.types import ToolSpec

Message = Mapping[str, Any]
"""A chat message in OpenAI's form: {"role", "content", ...}."""

_ASSISTANT_WORDS = ("content", "reasoning_content", "thinking")
_MAX_CACHED_TOOL_SETS = 256


def _local_now() -> datetime:
    return datetime.now().astimezone()


class ChatFormat:
    """One model's tokenizer and chat template. Read-only once loaded; safe to share within a process."""

    def __init__(self, files: ModelFiles, *, call_format: CallFormat, now: Callable[[], datetime] = _local_now) -> None:
        """Use `load`; `now` answers templates that print the date."""
        self._tokenizer = files.tokenizer
        self._templates = {
            name: ChatTemplate(source, variables=files.named_tokens, now=now)
            for name, source in files.templates.items()
        }
        sources = "\n".join(files.templates.values())
        self._encoder = GuardedEncoder(files.tokenizer, template_text=sources)
        self._dummy_forms: dict[tuple[bool, str], _DummyTurn] = {}
        self._tool_sets: dict[tuple[int, ...], tuple[tuple[ToolSpec, ...], list[ToolEntry]]] = {}
        self._end_of_turn = self._find_end_of_turn()
        end_of_turn = () if self._end_of_turn is None else (self._end_of_turn,)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*files.eos_ids, *end_of_turn)))
        """Ids that end a completion: of the tokenizer, the generation config, and the template's end of turn."""
        self._stop_texts = [files.tokenizer.id_to_token(token) or "" for token in self.stop_token_ids]
        self._turn_enders = frozenset(
            token for token, text in zip(self.stop_token_ids, self._stop_texts, strict=True) if text in sources
        )
        self.vocab_size: int = files.vocab_size
        """Ids an engine can return are below this; a padded embedding counts, although its padding has no text."""
        self.call_format = call_format
        """How tool calls look in completions."""
        if not call_format.describes_tools:
            tool_template = self._templates.get(TOOL_TEMPLATE) or self._templates[DEFAULT_TEMPLATE]
            check_template_agrees(tool_template, call_format=call_format)

    @classmethod
    def load(
        cls, model_dir: Path, *, chat_template: Path | None = None, tool_call_parser: str = "hermes"
    ) -> ChatFormat:
        """Read tokenizer and template of a `save_pretrained` directory.

        `chat_template` names a Jinja file that replaces the model's own template.

        Raises:
            UnavailableError: tokenizer or template is missing or unreadable.
            ConfigError: the template is no valid Jinja, or writes calls in another format than `tool_call_parser`.
        """
        files = read_model_files(Path(model_dir), chat_template=chat_template)
        return cls(files, call_format=get_call_format(tool_call_parser))

    def render_prompt(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """Ids of a conversation, ending with the generation prompt.

        Equal to transformers' `apply_chat_template(..., add_generation_prompt=True)` where no message spells a
        control token. In an assistant's own words markup tokens (`<think>`, `<tool_call>`) stay tokens; special
        tokens become text there too.

        Raises:
            ConfigError: the template refuses the conversation.
        """
        if tools and self.call_format.describes_tools:
            messages = explain_tools(results_as_user(messages), tools=tools, call_format=self.call_format)
            tools = ()
        guard, marked, tool_set = self._mark(messages, tools=tools)
        text = self._template(tools).render(marked, tools=tool_set, add_generation_prompt=True)
        return tuple(self._encoder.encode_prompt(text, guard=guard))

    def render_continuation(
        self, new_messages: Sequence[Message], *, completion_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """Ids that follow a completion: its end of turn where it lacks one, the new messages, the generation prompt.

        A completion cut by length gets the full end of turn; one that ends with an end-of-turn token keeps its own.

        Raises:
            ConfigError: the template refuses the messages.
        """
        if tools and self.call_format.describes_tools:
            new_messages, tools = results_as_user(new_messages), ()
        guard, marked, tool_set = self._mark(new_messages, tools=tools)
        text = self._after_assistant(marked, tool_set=tool_set, template=self._template(tools), guard=guard)
        ids = self._encoder.encode(text, guard=guard)
        if completion_ids and ids and self._is_same_end(sampled=completion_ids[-1], rendered=ids[0]):
            ids = ids[1:]
        return tuple(ids)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of plain text: control tokens cannot come out."""
        guard = self._encoder.guard
        try:
            marked = guard.mark(text)
        except SentinelClashError:
            guard = self._encoder.guard_for(text)
            marked = guard.mark(text)
        return tuple(self._encoder.encode(marked, guard=guard))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens kept. Incomplete characters become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def completion_text(self, ids: Sequence[int]) -> str:
        """What the model wrote: the text without a trailing stop token."""
        ends_with_stop = bool(ids) and ids[-1] in self.stop_token_ids
        return self.decode(ids[:-1] if ends_with_stop else ids)

    def parse(self, text: str, *, tools: Sequence[ToolSpec] = ()) -> ParsedCompletion:
        """Reasoning, visible text and tool calls of what the model wrote; never raises."""
        return parse_completion(text, call_format=self.call_format, tools=tools)

    def _template(self, tools: Sequence[ToolSpec]) -> ChatTemplate:
        if tools and TOOL_TEMPLATE in self._templates:
            return self._templates[TOOL_TEMPLATE]
        return self._templates.get(DEFAULT_TEMPLATE) or self._templates[TOOL_TEMPLATE]

    def _mark(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]
    ) -> tuple[Guard, list[dict[str, Any]], list[Any] | None]:
        """Messages and tools in the template's form with look-alikes marked, and the guard that reads the marks."""
        guard = self._encoder.guard
        try:
            return guard, [_mark_message(message, guard=guard) for message in messages], self._tool_set(tools)
        except SentinelClashError:
            openai_tools = [tool.as_openai() for tool in tools]
            guard = self._encoder.guard_for(_all_text([list(messages), openai_tools]))
            marked = [_mark_message(message, guard=guard) for message in messages]
            return guard, marked, [guard.mark_all(tool) for tool in openai_tools] or None

    def _tool_set(self, tools: Sequence[ToolSpec]) -> list[Any] | None:
        """Marked tools in OpenAI form, or None. Cached: every turn of every rollout passes the same ones."""
        if not tools:
            return None
        key = tuple(map(id, tools))
        cached = self._tool_sets.get(key)
        if cached is None:
            if len(self._tool_sets) >= _MAX_CACHED_TOOL_SETS:
                self._tool_sets.clear()
            # The tools are kept with the entry: their ids stay theirs as long as it lives.
            cached = (tuple(tools), [ToolEntry(self._encoder.guard.mark_all(tool.as_openai())) for tool in tools])
            self._tool_sets[key] = cached
        return cached[1]

    def _after_assistant(
        self, marked: list[dict[str, Any]], *, tool_set: list[Any] | None, template: ChatTemplate, guard: Guard
    ) -> str:
        """Text that follows an assistant's words: found by rendering a stand-in for everything before."""
        shape = (tool_set is not None, str(marked[0].get("role")) if marked else "")
        known = self._dummy_forms.get(shape)
        refusal: ConfigError | None = None
        for form in _DUMMY_FORMS if known is None else (known,):
            messages = [{"role": "user", "content": "?"}, form(marked, guard.marker), *marked]
            try:
                text = template.render(messages, tools=tool_set, add_generation_prompt=True)
            except ConfigError as error:
                refusal = refusal or error
                continue
            after = self._cut_after_marker(text, marker=guard.marker, to_end_of_turn=form is _calling_turn)
            if after is not None:
                self._dummy_forms[shape] = form
                return after
        raise refusal or ConfigError("the chat template does not show what the assistant says: cannot continue a turn")

    def _cut_after_marker(self, text: str, *, marker: str, to_end_of_turn: bool) -> str | None:
        _, found, after = text.rpartition(marker)
        if not found:
            return None
        if not to_end_of_turn:
            return after
        ends = [position for stop in self._stop_texts if (position := after.find(stop)) >= 0]
        return after[min(ends) :] if ends else None

    def _find_end_of_turn(self) -> int | None:
        """The control token that the template writes right after an assistant's words, if it writes one."""
        guard = self._encoder.guard
        messages = [{"role": "user", "content": "?"}, _plain_turn([], guard.marker)]
        try:
            text = self._template(()).render(messages, tools=None, add_generation_prompt=False)
        except ConfigError:
            return None
        ids = self._encoder.encode(text.rpartition(guard.marker)[2], guard=guard)
        return ids[0] if ids and ids[0] in self._encoder.control_ids else None

    def _is_same_end(self, *, sampled: int, rendered: int) -> bool:
        """Whether the completion's last token already says what the rendered continuation starts with."""
        if rendered not in self._encoder.control_ids:
            return False
        return sampled == rendered or (rendered == self._end_of_turn and sampled in self._turn_enders)


_DummyTurn = Callable[[list[dict[str, Any]], str], dict[str, Any]]


def _plain_turn(new_messages: list[dict[str, Any]], marker: str) -> dict[str, Any]:
    """An assistant turn that only speaks."""
    return {"role": "assistant", "content": marker}


def _calling_turn(new_messages: list[dict[str, Any]], marker: str) -> dict[str, Any]:
    """An assistant turn that asks for the calls which the new messages answer, for templates that insist on it."""
    answers = [message for message in new_messages if message.get("role") == "tool"] or [{}]
    calls = [
        {
            "id": answer.get("tool_call_id", f"call_{index}"),
            "type": "function",
            "function": {"name": answer.get("name", "tool"), "arguments": {"text": marker}},
        }
        for index, answer in enumerate(answers)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


_DUMMY_FORMS: tuple[_DummyTurn, ...] = (_plain_turn, _calling_turn)


def _mark_message(message: Message, *, guard: Guard) -> dict[str, Any]:
    normalized = normalize_message(message)
    if normalized.get("role") != "assistant":
        return {key: guard.mark_all(value) for key, value in normalized.items()}
    return {
        key: guard.mark(value, keep_markup=True)
        if key in _ASSISTANT_WORDS and isinstance(value, str)
        else guard.mark_all(value)
        for key, value in normalized.items()
    }


def _all_text(value: Any) -> str:
    """Every string of a JSON value, joined: what a sentinel must be absent from."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(_all_text(entry) for pair in value.items() for entry in pair)
    if isinstance(value, list | tuple):
        return "\n".join(map(_all_text, value))
    return ""
