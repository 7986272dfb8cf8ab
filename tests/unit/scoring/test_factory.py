import asyncio
import gc
import threading
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from agentrl.errors import ConfigError, ScoringError
from agentrl.scoring import MCPScorerFactory, load_scorers, score_answer

TRUTH = {"query": "q", "answer": "a"}


@pytest.fixture(autouse=True)
def own_scorers(monkeypatch):
    """Scorers registered by a test end with it."""
    monkeypatch.setattr(MCPScorerFactory, "_scorers", dict(MCPScorerFactory._scorers))


async def test_a_registered_scorer_gets_answer_truth_and_config():
    seen = []

    async def mine(answer, ground_truth, scorer_config):
        seen.append((answer, ground_truth, scorer_config))
        return 0.25

    MCPScorerFactory.register_scorer("mine", mine)
    assert "mine" in MCPScorerFactory.names()
    assert MCPScorerFactory.get_scorer("mine") is mine
    assert await score_answer("mine", "x", TRUTH, {"k": 1}) == 0.25
    assert seen == [("x", TRUTH, {"k": 1})]


async def test_a_scorer_without_the_config_argument_is_really_called():
    async def length(answer, ground_truth):
        return len(answer) + len(ground_truth["answer"])

    MCPScorerFactory.register_scorer("length", length)
    assert await score_answer("length", "four", TRUTH, {"k": 1}) == 5.0


async def test_methods_partials_and_callable_objects_are_scorers():
    class Judge:
        async def grade(self, answer, ground_truth):
            return 1.0

        async def __call__(self, answer, ground_truth, config):
            return 2.0

    async def scaled(factor, answer, ground_truth, config):
        return factor

    MCPScorerFactory.register_scorer("method", Judge().grade)
    MCPScorerFactory.register_scorer("object", Judge())
    MCPScorerFactory.register_scorer("partial", partial(scaled, 3.0))
    assert [await score_answer(name, "x", TRUTH, {}) for name in ("method", "object", "partial")] == [1, 2, 3]


async def nothing():
    return 1.0


async def too_much(a, b, c, d):
    return 1.0


@pytest.mark.parametrize(("function", "message"), [(nothing, "signature"), (too_much, "signature")])
def test_a_function_that_cannot_be_a_scorer_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        MCPScorerFactory.register_scorer("mine", function)
    assert "mine" not in MCPScorerFactory.names()


async def test_a_name_is_taken_only_with_replace():
    async def always(answer, truth):
        return 1.0

    with pytest.raises(ConfigError, match="replace=True"):
        MCPScorerFactory.register_scorer("em", always)
    assert await score_answer("em", "x", TRUTH, {}) == 0
    MCPScorerFactory.register_scorer("em", always, replace=True)
    assert await score_answer("em", "x", TRUTH, {}) == 1


def test_an_unknown_scorer_is_named_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match="'mth'; did you mean 'math'"):
        MCPScorerFactory.get_scorer("mth")
    with pytest.raises(
        ConfigError,
        match="known: agentcpm, asearcher, browsecomp, choice, em, f1, format, gaia, math, simpleqa, sub_em",
    ):
        MCPScorerFactory.get_scorer("zzzz")


@pytest.mark.parametrize("name", ["agentcpm", "asearcher", "simpleqa", "browsecomp"])
async def test_a_judge_is_never_replaced_by_something_else_where_none_is_configured(name):
    with pytest.raises(ConfigError, match="is an LLM judge: set --agent_config_path"):
        await score_answer(name, "x", TRUTH, {})


async def test_plain_functions_of_two_or_three_arguments_are_scorers_too():
    MCPScorerFactory.register_scorer("two", lambda answer, truth: 0.25)
    MCPScorerFactory.register_scorer("three", lambda answer, truth, config: config["k"])
    assert await score_answer("0.5*two + three", "x", TRUTH, {"k": 2.0}) == 2.125


async def test_a_plain_function_that_blocks_does_not_block_the_others():
    release = threading.Event()

    def slow(answer, truth):
        assert release.wait(timeout=10)
        return 1.0

    MCPScorerFactory.register_scorer("slow", slow)
    waiting = asyncio.create_task(score_answer("slow", "x", TRUTH, {}))
    assert await score_answer("em", "a", TRUTH, {}) == 1.0
    release.set()
    assert await waiting == 1.0


async def test_a_key_that_a_scorer_quotes_is_in_no_message():
    async def leaky(answer, truth, config):
        raise RuntimeError(f"401 for {config['models'][0]['api_key']}")

    MCPScorerFactory.register_scorer("leaky", leaky)
    with pytest.raises(ScoringError, match=r"401 for \*\*\*$"):
        await score_answer("leaky", "x", TRUTH, {"models": [{"api_key": "topsecret"}]})


def test_the_version_of_a_scorer_changes_with_the_code_that_decides():
    MCPScorerFactory.register_scorer("mine", lambda answer, truth: 0.0)
    first = MCPScorerFactory.version("mine + em", judge=None)
    assert first.startswith("mine + em @")
    assert MCPScorerFactory.version("mine + em", judge=None) == first
    MCPScorerFactory.register_scorer("mine", lambda answer, truth: 1.0, replace=True)
    assert MCPScorerFactory.version("mine + em", judge=None) != first


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0]])
async def test_a_result_that_is_no_finite_number_is_a_failure(value):
    async def odd(answer, truth):
        return value

    MCPScorerFactory.register_scorer("odd", odd)
    with pytest.raises(ScoringError, match=r"'odd' returned .* no finite number"):
        await score_answer("odd", "x", TRUTH, {})


@pytest.mark.parametrize(
    ("value", "score"),
    [(True, 1.0), (0, 0.0), (np.float32(0.5), 0.5), (-2, -2.0), (np.True_, 1.0), (Decimal("0.5"), 0.5)],
)
async def test_every_finite_number_is_a_score(value, score):
    async def fine(answer, truth):
        return value

    MCPScorerFactory.register_scorer("fine", fine)
    result = await score_answer("fine", "x", TRUTH, {})
    assert (result, type(result)) == (score, float)


async def test_a_scorer_that_raises_is_a_failure_with_its_error():
    async def broken(answer, truth):
        raise KeyError("label")

    MCPScorerFactory.register_scorer("broken", broken)
    with pytest.raises(ScoringError, match="'broken' failed: KeyError: 'label'") as caught:
        await score_answer("broken", "x", TRUTH, {})
    assert isinstance(caught.value.__cause__, KeyError)


class _SpeechlessError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class _NoNumber:
    def __float__(self):
        raise RuntimeError("no number")

    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(), "StopIteration"),
        (GeneratorExit(), "GeneratorExit"),
        (_SpeechlessError(), "its message cannot be shown"),
        (ValueError("x" * 10_000), "ValueError: x{500}$"),
    ],
)
async def test_whatever_a_scorer_raises_is_its_failure_and_never_the_samplers_end(is_async, raised, message):
    def direct(answer, truth):
        raise raised

    async def awaited(answer, truth):
        raise raised

    MCPScorerFactory.register_scorer("odd", awaited if is_async else direct)
    with pytest.raises(ScoringError, match=message):
        await score_answer("odd", "x", TRUTH, {}, deadline_s=30)


@pytest.mark.parametrize("value", [10**400, Fraction(10**400), Decimal("sNaN"), 1j, _NoNumber(), np.zeros(2)])
async def test_a_number_that_no_float_can_hold_is_a_failure(value):
    MCPScorerFactory.register_scorer("odd", lambda answer, truth: value)
    with pytest.raises(ScoringError, match="no finite number"):
        await score_answer("odd", "x", TRUTH, {})


async def test_scorers_that_never_return_hold_up_no_other_scorer():
    ended = threading.Event()
    MCPScorerFactory.register_scorer("stuck", lambda answer, truth: float(ended.wait(60)))
    MCPScorerFactory.register_scorer("quick", lambda answer, truth: 1.0)
    stuck = [score_answer("stuck", "x", TRUTH, {}, deadline_s=0.05) for _ in range(40)]
    try:
        assert all(isinstance(end, ScoringError) for end in await asyncio.gather(*stuck, return_exceptions=True))
        assert await score_answer("quick", "x", TRUTH, {}, deadline_s=30) == 1.0
    finally:
        ended.set()


async def test_a_scorer_that_hangs_is_cancelled_at_the_deadline():
    cancelled = asyncio.Event()

    async def hang(answer, truth):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1.0

    MCPScorerFactory.register_scorer("hang", hang)
    with pytest.raises(ScoringError, match=r"within 0\.05 s"):
        await score_answer("hang", "x", TRUTH, {}, deadline_s=0.05)
    assert cancelled.is_set()


async def test_cancelling_a_score_cancels_the_scorer():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(answer, truth):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1.0

    MCPScorerFactory.register_scorer("hang", hang)
    scoring = asyncio.create_task(score_answer("hang", "x", TRUTH, {}))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert cancelled.is_set()


async def test_what_a_scorer_raises_when_nobody_waits_any_more_is_logged_nowhere(caplog):
    started = asyncio.Event()

    async def quotes_its_key(answer, truth):
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("planted-key-123")

    MCPScorerFactory.register_scorer("quotes", quotes_its_key)
    scoring = asyncio.create_task(score_answer("quotes", "x", TRUTH, {}))
    await started.wait()
    scoring.cancel()
    await asyncio.wait({scoring})
    del scoring
    gc.collect()
    assert "planted-key-123" not in caplog.text


SCORER_FILE = """
from agentrl.scoring import MCPScorerFactory

async def shouting(answer, ground_truth):
    return float(answer.isupper())

MCPScorerFactory.register_scorer("shouting", shouting)
"""


async def test_a_file_that_registers_scorers_is_loaded_once(tmp_path):
    path = tmp_path / "my_scorers.py"
    path.write_text(SCORER_FILE, encoding="utf-8")
    assert "shouting" in load_scorers(str(path))
    assert "shouting" in load_scorers(str(path))
    assert await score_answer("shouting", "YES", TRUTH, {}) == 1


async def test_a_dotted_module_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "dotted_scorers.py").write_text(SCORER_FILE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "shouting" in load_scorers("dotted_scorers")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1", "registers no scorer"),
        ("import no_such_module_at_all", r"cannot be imported: ModuleNotFoundError.*useless\.py, line 1"),
        ("x = 1\ny = missing_name", r"cannot be imported: NameError.*'missing_name'.*useless\.py, line 2"),
        ("x = 1\ndef", r"cannot be imported: SyntaxError.*useless\.py, line 2"),
        ("raise SystemExit('bye')", r"cannot be imported: SystemExit: bye .*useless\.py, line 1"),
        ("raise ValueError('two\\nlines')", "cannot be imported: ValueError: two lines "),
        ("import json\njson.loads('{')", r"cannot be imported: JSONDecodeError.*useless\.py, line 2"),
    ],
)
def test_a_file_that_is_of_no_use_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "useless.py"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"useless\.py.*{message}"):
        load_scorers(str(path))


@pytest.mark.parametrize("module_path", ["absent/scorers.py", "no_such_module_at_all", "not a module"])
def test_a_module_that_is_not_there_is_refused_by_name(module_path):
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_scorers(module_path)


def test_a_dotted_module_that_fails_is_refused_with_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "failing_scorers.py").write_text("\n\n1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: division by zero \(.*failing_scorers\.py, line 3\)"):
        load_scorers("failing_scorers")
