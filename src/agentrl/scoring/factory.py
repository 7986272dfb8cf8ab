"""`MCPScorerFactory`: scorers by name, built in or registered by the user; `score_request` runs an expression of them.

    async def shorter_is_better(answer, ground_truth, scorer_config):
        return 1.0 / (1 + len(answer))

    MCPScorerFactory.register_scorer("shorter", shorter_is_better)

The third argument may be left out; a function without `async` runs in a thread. A scorer that raises, hangs or returns
no finite number is a ScoringError, never a score of 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ClassVar

from agentrl.errors import BudgetSpentError, ConfigError, ScoringError
from agentrl.protocols import Scorer
from agentrl.scoring.expression import parse_expression
from agentrl.scoring.gaia import gaia, sub_exact_match
from agentrl.scoring.judge import JUDGE_DEADLINE_S, MAX_ASKED, Judge, JudgeCall
from agentrl.scoring.math_process import QUEUE_TIMEOUT_S
from agentrl.scoring.scorers import exact_match, letter_choice, math_equal, token_f1
from agentrl.scoring.tool_format import tool_format
from agentrl.scoring.user_functions import as_scorer, checked_score
from agentrl.types import DispatchedSamplingTask, ToolSpec
from agentrl.user_modules import described, import_user_module, is_imported, without_exit

SCORE_DEADLINE_S = 120.0
JUDGE_SCORERS: Mapping[str, str] = {
    "agentcpm": "agentcpm", "asearcher": "agentcpm", "simpleqa": "simpleqa", "browsecomp": "browsecomp"
}  # fmt: skip
"""Judges by scorer name: the prompt each one asks with."""
FORMAT_SCORER = "format"
RULES_VERSION = 1
"""Grows with every change of what a built-in rule says of some answer; part of every scorer version."""
_CANCEL_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What of a Record a scorer may look at."""

    answer: str | None  # None: the policy gave none, which is 0 for every scorer of answers
    ground_truth: Mapping[str, Any]  # {"query", "answer"}
    calls: Sequence[DispatchedSamplingTask] = ()  # its tool calls
    tools: Sequence[ToolSpec] = ()  # the tools its prompt named


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringContext:
    """What scorers work with; shared by all Records of a process."""

    judge: Judge | None = None
    scorer_config: Mapping[str, Any] = field(default_factory=dict)  # scorer_agent of agent_config.yml, keys included


class MCPScorerFactory:
    """The scorers of this process, by name."""

    _scorers: ClassVar[dict[str, Scorer]] = {
        "em": exact_match,
        "f1": token_f1,
        "math": math_equal,
        "choice": letter_choice,
        "gaia": gaia,
        "sub_em": sub_exact_match,
    }

    @classmethod
    def register_scorer(
        cls, name: str, function: Callable[..., Awaitable[float] | float], *, replace: bool = False
    ) -> None:
        """Make `function(answer, ground_truth[, scorer_config])`, async or not, available as `name`.

        Raises ConfigError.
        """
        if parse_expression(name).names != (name,):
            raise ConfigError(f"scorer {name!r}: a name has letters, digits, _ and - only")
        if name in cls.names() and not replace:
            raise ConfigError(f"scorer {name!r} is registered already; choose another name or pass replace=True")
        cls._scorers[name] = as_scorer(name, function)

    @classmethod
    def get_scorer(cls, name: str) -> Scorer:
        """The function of that name. Raises ConfigError naming the nearest known one."""
        cls.check_name(name)
        if name not in cls._scorers:
            raise ConfigError(f"scorer {name!r} is no plain function: it needs a judge or the Record's tool calls")
        return cls._scorers[name]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All scorers that can be used, sorted."""
        return tuple(sorted({*cls._scorers, *JUDGE_SCORERS, FORMAT_SCORER}))

    @classmethod
    def check_name(cls, name: str) -> None:
        """Raise ConfigError naming the nearest known scorer unless `name` is one."""
        if name not in cls.names():
            nearest = get_close_matches(name, cls.names(), n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(cls.names())}"
            raise ConfigError(f"unknown scorer {name!r}; {hint}")

    @classmethod
    def needs_judge(cls, expression: str) -> bool:
        """Whether a scorer may ask a judge. Raises ConfigError."""
        names = parse_expression(expression).names
        return any(name in JUDGE_SCORERS and name not in cls._scorers for name in names)

    @classmethod
    def version(cls, expression: str, *, judge: Judge | None) -> str:
        """The scorer with a fingerprint of all that decides its numbers. Raises ConfigError."""
        parts = [f"{name}={cls._fingerprint(name, judge=judge)}" for name in parse_expression(expression).names]
        digest = hashlib.sha256(";".join(parts).encode()).hexdigest()
        return f"{' '.join(expression.split())} @{digest[:8]}"

    @classmethod
    def _fingerprint(cls, name: str, *, judge: Judge | None) -> str:
        cls.check_name(name)
        if name in JUDGE_SCORERS and name not in cls._scorers:
            return _required(judge, name=name).version(JUDGE_SCORERS[name])
        function = cls._scorers.get(name)
        if function is None or getattr(function, "__module__", "").startswith("agentrl.scoring."):
            return f"rules {RULES_VERSION}"
        original = inspect.unwrap(function)
        try:
            return inspect.getsource(original)
        except (OSError, TypeError):  # a callable object, or no source at hand
            return f"{type(original).__module__}.{type(original).__qualname__}"


async def score_answer(
    scorer: str,
    answer: str,
    ground_truth: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    deadline_s: float = SCORE_DEADLINE_S,
) -> float:
    """The score of `answer` by rules alone, a finite float. Raises ScoringError; ConfigError for an unknown scorer."""
    request = ScoreRequest(answer=answer, ground_truth=ground_truth)
    return await score_request(
        scorer, request, context=ScoringContext(scorer_config=config), calls=[], deadline_s=deadline_s
    )


async def score_request(
    expression: str,
    request: ScoreRequest,
    *,
    context: ScoringContext,
    calls: list[JudgeCall],
    deadline_s: float = SCORE_DEADLINE_S,
) -> float:
    """The score of a Record, a finite float; requests to a judge are appended to `calls`, failed ones included.

    `deadline_s` bounds each rule; a judge and `math` have deadlines of their own. Raises ScoringError; ConfigError for
    a scorer that is unknown, cannot be read, or needs a judge that is not configured.
    """
    parsed = parse_expression(expression)
    for name in parsed.names:
        MCPScorerFactory.check_name(name)

    async def score(name: str) -> float:
        work, limit_s = _work_of(name, request, context=context, calls=calls, deadline_s=deadline_s)
        return await _bounded(name, work, deadline_s=limit_s, config=context.scorer_config)

    return checked_score(expression, await parsed.evaluate(score))


def _work_of(
    name: str, request: ScoreRequest, *, context: ScoringContext, calls: list[JudgeCall], deadline_s: float
) -> tuple[Awaitable[float], float]:
    """What scores the request under one name, and how long it may take."""
    function = MCPScorerFactory._scorers.get(name)
    if function is None and name == FORMAT_SCORER:
        return _constant(tool_format(request.calls, request.tools)), deadline_s
    judge = None if function is not None else _required(context.judge, name=name)
    if request.answer is None:
        return _constant(0.0), deadline_s
    if function is not None:
        limit_s = max(deadline_s, QUEUE_TIMEOUT_S) if function is math_equal else deadline_s
        return function(request.answer, request.ground_truth, context.scorer_config), limit_s
    assert judge is not None
    work = _judged(judge, JUDGE_SCORERS[name], answer=request.answer, ground_truth=request.ground_truth, calls=calls)
    return work, MAX_ASKED * max(judge.deadline_s, JUDGE_DEADLINE_S) + deadline_s


async def _judged(
    judge: Judge, prompt: str, *, answer: str, ground_truth: Mapping[str, Any], calls: list[JudgeCall]
) -> float:
    return (await judge.verdict(prompt, answer=answer, ground_truth=ground_truth, calls=calls)).score


async def _constant(value: float) -> float:
    return value


def _required(judge: Judge | None, *, name: str) -> Judge:
    if judge is None:
        raise ConfigError(
            f"scorer {name!r} is an LLM judge: set --agent_config_path to a file whose scorer_agent is on, "
            "or choose a rule such as em, f1, gaia or math"
        )
    return judge


async def _bounded(scorer: str, work: Awaitable[float], *, deadline_s: float, config: Mapping[str, Any]) -> float:
    # A task, so that whatever a user's scorer raises is an outcome to name and not an exception to catch blindly.
    task = asyncio.ensure_future(without_exit(work))
    task.add_done_callback(_see_error)
    try:
        await asyncio.wait({task}, timeout=deadline_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
    if not task.done() or task.cancelled():
        raise ScoringError(f"scorer {scorer!r} gave no score within {deadline_s:g} s")
    error = task.exception()
    if isinstance(error, BudgetSpentError):
        raise error
    if error is not None:
        message = _without_keys(f"scorer {scorer!r} failed: {described(error)}", config)
        is_retryable = isinstance(error, ScoringError) and error.retryable
        raise ScoringError(message, retryable=is_retryable) from error
    return checked_score(scorer, task.result())


def _see_error(task: asyncio.Future[float]) -> None:
    """Of a score nobody waits for any more, asyncio would log the error, keys included."""
    if not task.cancelled():
        task.exception()


def _without_keys(message: str, config: Mapping[str, Any]) -> str:
    """A user's scorer gets the keys of the configuration, and may quote them in what it raises."""
    for model in config.get("models", ()):
        key = model.get("api_key") if isinstance(model, Mapping) else None
        message = message.replace(str(key), "***") if key else message
    return message


def load_scorers(module_path: str) -> tuple[str, ...]:
    """Import a dotted module or a .py file that registers scorers; returns the names known afterwards.

    Raises ConfigError if it cannot be found or imported, naming file and line, or if it registers nothing.
    """
    if is_imported(module_path):
        return MCPScorerFactory.names()
    before = set(MCPScorerFactory.names())
    import_user_module(module_path, setting="scorer_module")
    if set(MCPScorerFactory.names()) == before:
        raise ConfigError(
            f"scorer_module = {module_path!r} registers no scorer; "
            "call MCPScorerFactory.register_scorer(name, function) at its top level"
        )
    return MCPScorerFactory.names()
