"""Test-time scaling measured on scripted policies: one rollout for all points, and nothing rolled out twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, ReflectionConfig, RolloutConfig, RunConfig, StoreConfig
from agentrl.errors import ConfigError, EngineError, EngineErrorKind, UnavailableError
from agentrl.evaluate import evaluate
from agentrl.evaluate.measure import ScalingPlan, measure_scaling, with_episodes
from agentrl.rollout.custom import sampler_of
from agentrl.rollout.dataset import TaskRow
from agentrl.rollout.parts import RunParts
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import InferenceService, Recovery, ServiceStatus
from scripted_engine import Script, ScriptedEngine
from tiny_chat import write_tiny_chat

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
AGAIN = "Look again."
ROWS = [TaskRow(item_id=name, query=f"{name}: 2+3?", answer="five oxen", scorer="em") for name in ("a", "b")]
SERVICE = InferenceService(id="scripted", base_url="http://scripted", status=ServiceStatus.UP, policy_version=7)


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


def improve(context: str, depth: int) -> str:
    """Wrong after a call, then right after a turn of mere talk; the second question is right at once, then spoilt."""
    episode, is_second = context.count(AGAIN), "b: 2+3?" in context
    if episode == 0:
        return CALL if "<tool_response>" not in context else f"<answer>{'five oxen' if is_second else 'six'}</answer>"
    if episode == 1:
        talked = "hmm" in context
        return ("<answer>six</answer>" if is_second else "<answer>five big oxen</answer>") if talked else "hmm"
    return "<answer>The five oxen!</answer>"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


async def run_parts(model_dir: Path, script: Script, **reflection: object) -> tuple[RunParts, ScriptedEngine]:
    engine = ScriptedEngine(model_dir, script, version=7)
    store = MemoryStore()
    await store.put_service(SERVICE)
    config = RunConfig(
        store=StoreConfig(heartbeat_s=0.02, lease_s=0.3),
        rollout=RolloutConfig(num_generations=2, max_new_tokens=200, max_prompt_tokens=2000, max_turns=3),
        reflection=ReflectionConfig.model_validate({"reflection_prompt": AGAIN, **reflection}),
        inference=InferenceConfig(context_length=4000),
    )
    toolbox = FunctionToolbox([add], recovery=Recovery.STATELESS)
    return RunParts(
        config=config, store=store, toolbox=toolbox, client=engine, chat=ChatFormat.load(model_dir)
    ), engine  # fmt: skip


async def test_one_rollout_of_a_policy_gives_every_turn(model_dir):
    parts, engine = await run_parts(model_dir, improve)
    report = await measure_scaling(parts, rows=ROWS, policy_version=7, plan=ScalingPlan(turns=range(1, 4)))
    _, second, third = report.turns
    assert [point.num_trajectories for point in report.turns] == [2, 2, 2]
    assert [point.accuracy for point in report.turns] == [0.5, 0.0, 1.0]
    assert [point.success for point in report.turns] == [0.5, 0.5, 1.0]
    assert (second.right_to_wrong, second.wrong_to_right, third.wrong_to_right) == (0.5, 0.0, 1.0)
    assert (second.em, second.sub_em) == (0.0, 0.0)
    assert second.f1 == pytest.approx((2 * 2 / 5) / 2)  # "five big oxen" has both words of the truth; "six" none
    assert [point.invalid_actions for point in report.turns] == [0.0, 0.5, 0.0]
    assert [point.tool_calls for point in report.turns] == [1.0, 0.0, 0.0]
    assert third.total_tool_calls == 1.0
    assert third.repeated_answers == 0.5  # the second question had this answer before
    num_requests = len(engine.requests)
    assert num_requests == 2 * (2 + 2 + 1)
    again = await measure_scaling(parts, rows=ROWS, policy_version=7, plan=ScalingPlan(turns=range(2, 4)))
    assert again.turns == (second, third)
    assert len(engine.requests) == num_requests, "what is there is not rolled out again"


async def test_a_policy_that_reflected_after_wrong_answers_reflects_after_every_one_here(model_dir):
    parts, _ = await run_parts(model_dir, improve, episodes=2, reflect_when="wrong")
    report = await measure_scaling(parts, rows=ROWS[1:], policy_version=7, plan=ScalingPlan(turns=range(1, 4)))
    assert [point.accuracy for point in report.turns] == [1.0, 0.0, 1.0]


async def test_no_evaluation_tells_the_policy_which_held_out_answers_are_wrong(model_dir):
    parts, _ = await run_parts(model_dir, improve, episodes=2, reflect_when="wrong")
    parts = replace(parts, sampler_class=sampler_of(parts.config))
    report = await evaluate(parts, rows=ROWS[1:], policy_version=7)
    assert report.score == 0.0, "its right answer is reflected on, too, and spoilt"


async def test_turns_without_room_are_wrong_and_counted(model_dir):
    parts, _ = await run_parts(model_dir, improve)
    rollout = parts.config.rollout.model_copy(update={"max_prompt_tokens": 220})
    parts = replace(parts, config=parts.config.model_copy(update={"rollout": rollout}))
    report = await measure_scaling(parts, rows=ROWS, policy_version=7, plan=ScalingPlan(turns=range(1, 4)))
    assert report.turns[0].lost == 0.0
    assert report.turns[2].lost == report.turns[2].unanswered == 1.0


async def test_samples_are_single_attempts_that_vote_whatever_the_run_does_in_training(model_dir):
    def draw(context: str, depth: int) -> str:
        return f"<answer>{('five oxen', 'six', 'Five oxen.', 'seven')[depth]}</answer>"

    parts, engine = await run_parts(model_dir, draw, episodes=3)
    plan = ScalingPlan(samples=range(1, 4), num_generations=4)
    report = await measure_scaling(parts, rows=ROWS[:1], policy_version=7, plan=plan)
    assert len(engine.requests) == 4
    assert [point.samples for point in report.samples] == [1, 2, 3]
    assert [point.pass_at for point in report.samples] == [0.5, pytest.approx(5 / 6), 1.0]
    assert report.samples[0].accuracy == 0.5
    assert report.samples[2].accuracy == pytest.approx(sum(_first_three_votes()) / 4)
    assert report.turns == ()


def _first_three_votes() -> list[bool]:
    """By hand: of the four subsets of three of (right, six, right, seven), which vote right."""
    return [True, True, True, False]


async def test_other_settings_are_another_evaluation_and_greedy_reaches_every_request(model_dir):
    parts, engine = await run_parts(model_dir, improve)
    plan = ScalingPlan(turns=range(1, 3))
    sampled = await measure_scaling(parts, rows=ROWS, policy_version=7, plan=plan)
    assert {request.params.temperature for request in engine.requests} == {1.0}
    num_requests = len(engine.requests)
    inference = parts.config.inference.model_copy(update={"preferred_sampling_params": {"temperature": 0.0}})
    greedy_parts = replace(parts, config=parts.config.model_copy(update={"inference": inference}))
    greedy = await measure_scaling(greedy_parts, rows=ROWS, policy_version=7, plan=plan)
    assert {request.params.temperature for request in engine.requests[num_requests:]} == {0.0}
    assert len(engine.requests) == 2 * num_requests
    assert (sampled.temperature, greedy.temperature) == (1.0, 0.0)
    assert set(sampled.splits).isdisjoint(greedy.splits)


async def test_a_plain_evaluation_of_changed_tasks_or_tools_does_not_count_records_of_the_old_ones(model_dir):
    def draw(context: str, depth: int) -> str:
        return "<answer>five oxen</answer>" if "Think!" in context else "<answer>six</answer>"

    def slower(a: int, b: int) -> str:
        """Sum of two integers, checked twice."""
        return str(a + b)

    parts, engine = await run_parts(model_dir, draw)
    first = await evaluate(parts, rows=ROWS, policy_version=7)
    assert (first.score, first.num_records, len(engine.requests)) == (0.0, 2, 2)
    assert await evaluate(parts, rows=ROWS, policy_version=7) == first
    assert len(engine.requests) == 2, "what is there is not rolled out again"
    reworded = await evaluate(parts, rows=[replace(row, query=f"{row.query} Think!") for row in ROWS], policy_version=7)
    fewer = await evaluate(parts, rows=ROWS[:1], policy_version=7)
    toolbox = FunctionToolbox([slower], recovery=Recovery.STATELESS)
    retooled = await evaluate(replace(parts, toolbox=toolbox), rows=ROWS, policy_version=7)
    assert [(report.score, report.num_records) for report in (reworded, fewer)] == [(1.0, 2), (0.0, 1)]
    assert len({report.split for report in (first, reworded, fewer, retooled)}) == 4


async def test_a_sampler_that_makes_episodes_of_its_own_gives_one_sample_per_record(model_dir, tmp_path):
    module = tmp_path / "twice.py"
    module.write_text(
        "from dataclasses import replace\n"
        "from agentrl.config import ReflectionConfig\n"
        "from agentrl.rollout import MetaEpisodeSampler\n"
        "class Twice(MetaEpisodeSampler):\n"
        "    async def run(self):\n"
        f"        always = ReflectionConfig(episodes=2, reflection_prompt={AGAIN!r})\n"
        "        self.agent = replace(self.agent, reflection=always)\n"
        "        return await super().run()\n"
    )
    parts, _ = await run_parts(model_dir, improve)
    rollout = parts.config.rollout.model_copy(update={"sampler_module": str(module)})
    parts = replace(parts, config=parts.config.model_copy(update={"rollout": rollout}))
    plan = ScalingPlan(turns=range(1, 2), samples=range(1, 2))
    report = await measure_scaling(parts, rows=ROWS, policy_version=7, plan=plan)
    assert (report.turns[0].accuracy, report.samples[0].accuracy) == (0.0, 0.0), "the second answers are wrong"
    assert report.samples[0].total_tool_calls == 1.0


async def test_calls_an_episode_may_not_make_are_no_part_of_its_price(model_dir):
    def call_four_times(context: str, depth: int) -> str:
        return CALL * 4 if "<tool_response>" not in context else "<answer>five oxen</answer>"

    parts, _ = await run_parts(model_dir, call_four_times, tool_calls_per_episode=2)
    report = await measure_scaling(parts, rows=ROWS, policy_version=7, plan=ScalingPlan(turns=range(1, 2)))
    assert report.turns[0].tool_calls == 2.0


async def test_records_the_system_ended_are_counted_and_in_no_mean(model_dir):
    def fail_for_a(context: str, depth: int) -> str | BaseException:
        return EngineError("down", kind=EngineErrorKind.REJECTED) if "a: 2+3?" in context else improve(context, depth)

    parts, _ = await run_parts(model_dir, fail_for_a)
    report = await measure_scaling(parts, rows=ROWS, policy_version=7, plan=ScalingPlan(turns=range(1, 2)))
    assert (report.num_failed, report.num_questions, report.turns[0].num_trajectories) == (1, 2, 1)
    assert report.turns[0].accuracy == 1.0
    with pytest.raises(UnavailableError, match="none of the 1 Records of eval-v7-"):
        await measure_scaling(parts, rows=ROWS[:1], policy_version=7, plan=ScalingPlan(turns=range(1, 2)))


async def test_what_would_be_measured_in_vain_is_refused_before_any_work(model_dir):
    parts, _ = await run_parts(model_dir, improve)
    greedy = RunConfig(inference=InferenceConfig(preferred_sampling_params={"temperature": 0.0}))
    with pytest.raises(ConfigError, match="--parallel with temperature 0: all 3 samples"):
        ScalingPlan(samples=range(1, 4)).check(greedy, rows=ROWS)
    ScalingPlan(turns=range(1, 4)).check(greedy, rows=ROWS)
    with pytest.raises(ConfigError, match="--generations 4 with temperature 0"):
        ScalingPlan(turns=range(1, 4), num_generations=4).check(greedy, rows=ROWS)
    with pytest.raises(ConfigError, match="20 samples per question"):
        ScalingPlan(samples=range(1, 4), num_generations=20)
    odd = replace(ROWS[0], answer={"kind": "matrix"})
    with pytest.raises(ConfigError, match=r"task a: .* need answers in text"):
        ScalingPlan(turns=range(1, 2)).check(parts.config, rows=[odd])


def test_measuring_leaves_the_settings_of_training_alone():
    config = RunConfig(reflection=ReflectionConfig(episodes=3, reflect_when="wrong"))
    measured = with_episodes(config, episodes=6)
    assert (measured.reflection.episodes, measured.reflection.reflect_when) == (6, "always")
    assert config.reflection.episodes == 3
