"""The reflection example's world of namesakes, its teacher, its search server and its profile (assets/laptop/mr_*)."""

import importlib
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from agentrl.chat import ChatFormat, parse_completion
from agentrl.config.load import load_config
from agentrl.rollout.dataset import load_task_rows
from agentrl.scoring import MCPScorerFactory, extract_answer
from agentrl.tools import open_toolbox
from agentrl.tools.servers.search import SearchIndex, load_corpus
from agentrl.types import ToolRequest

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "assets" / "laptop"
sys.path.insert(0, str(LAPTOP))
world, teacher, start_model, start, tasks, make_corpus = (
    importlib.import_module(name)
    for name in ("mr_world", "mr_teacher", "start_model", "mr_build_start", "mr_generate_tasks", "mr_make_corpus")
)
FLAWLESS = teacher.Flaws(gives_up=0, stops_early=0, compares=1, compares_again=1, moves_on=0)


@pytest.fixture(scope="module")
def search():
    return SearchIndex(load_corpus(make_corpus.CORPUS), titles_only=True)


@pytest.fixture(scope="module")
def lessons():
    return list(teacher.Teacher(world.draw_names(), rng=random.Random(5)).lessons(2000))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mr_search") / "model"
    start.write_model(directory, seed=3)
    return directory


def attempts(search, *, flaws, num_episodes, calls_per_episode, count=300, is_held_out=True):
    drawn = world.corpus_half(is_held_out=is_held_out)
    solver = teacher.Teacher(world.draw_names(), rng=random.Random(2), flaws=flaws)
    questions = [world.draw_question(drawn, rng=random.Random(seed)) for seed in range(count)]
    shape = {"num_episodes": num_episodes, "calls_per_episode": calls_per_episode}
    return [(question, solver.solve(question, search, **shape)) for question in questions]


def test_the_corpus_is_the_one_the_tasks_are_made_from():
    assert make_corpus.CORPUS.read_text(encoding="utf-8").splitlines() == make_corpus.corpus_lines()


def test_held_out_people_firms_and_bosses_never_occur_in_training():
    train, held_out = (world.corpus_half(is_held_out=is_held_out) for is_held_out in (False, True))
    family_names = set(world.draw_names().family)
    known = {word for document in train.documents() for word in re.findall(r"[A-Z][a-z]+", document.text)}
    others = {word for document in held_out.documents() for word in re.findall(r"[A-Z][a-z]+", document.text)}
    assert known & others <= family_names | {"See"}
    assert len(held_out.people) * 4 == len(train.people) + len(held_out.people)


def test_task_files_repeat_with_their_seed_and_ask_no_question_twice(tmp_path):
    files = [tmp_path / "new" / "train.jsonl", tmp_path / "new" / "heldout.jsonl"]
    command = [sys.executable, LAPTOP / "mr_generate_tasks.py", "--seed", "1"]
    subprocess.run([*command, "--train_file", files[0], "--eval_file", files[1]], check=True, timeout=60)
    rows = [row for path in files for row in load_task_rows(path, known_scorers=MCPScorerFactory.names())]
    assert len({row.query for row in rows}) == len(rows) == tasks.NUM_TRAIN + tasks.NUM_EVAL
    assert {row.scorer for row in rows} == {"em"}
    again, other = (tasks.task_rows(seed, count=tasks.NUM_TRAIN, is_held_out=False) for seed in (1, 0))
    assert [row["query"] for row in again] == [row.query for row in rows[: tasks.NUM_TRAIN]]
    assert again != other


def test_a_name_finds_the_right_one_of_its_bearers_one_time_in_three(search):
    rows = tasks.task_rows(0, count=tasks.NUM_EVAL, is_held_out=True)
    for row in rows:
        first, trade = re.search(r"(\w+) the (\w+)\?", row["query"]).groups()
        found = search.search(first, top_k=1, max_chars=400)
        assert found == search.search(f"{first} {trade}", top_k=1, max_chars=400), "no query finds the trade at once"
        assert (f"is a {trade} at" in found) == (row["metadata"]["place"] == 0)
    assert np.mean([row["metadata"]["place"] == 0 for row in rows]) == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize("is_held_out", [False, True])
@pytest.mark.parametrize(("num_episodes", "calls_per_episode"), [(1, 6), (3, 2)])
def test_a_flawless_agent_answers_every_question_within_the_budget(
    search, num_episodes, calls_per_episode, is_held_out
):
    for question, lesson in attempts(
        search, flaws=FLAWLESS, num_episodes=num_episodes, calls_per_episode=calls_per_episode, is_held_out=is_held_out
    ):
        assert lesson.answers[-1] == question.answer, question.text


def test_one_episode_is_not_enough_for_most_questions(search):
    solved = attempts(search, flaws=FLAWLESS, num_episodes=3, calls_per_episode=2)
    rates = [np.mean([lesson.answers[n] == question.answer for question, lesson in solved]) for n in range(3)]
    assert rates[0] < 0.5
    assert rates[2] == 1.0


def test_the_teacher_is_right_about_a_third_of_the_time_in_either_form(search):
    for num_episodes, calls in ((1, 6), (3, 2)):
        solved = attempts(search, flaws=teacher.Flaws(), num_episodes=num_episodes, calls_per_episode=calls, count=1500)
        rate = np.mean([lesson.answers[-1] == question.answer for question, lesson in solved])
        assert rate == pytest.approx(0.36, abs=0.07)


def test_the_teacher_decides_badly_but_never_copies_badly(lessons):
    for lesson in lessons:
        known = lesson.query + "unknown"
        for completion, reply in zip(lesson.completions, [*lesson.replies, ()], strict=True):
            said = parse_completion(completion)
            words = [call.arguments["query"] for call in said.tool_calls] or [
                extract_answer(completion, schema="answer")
            ]
            for word in " ".join(filter(None, words)).split():
                assert word in known
            known += "".join(message["content"] for message in reply)


def test_demonstrations_say_nothing_about_the_people_of_the_corpus(lessons):
    facts = {document.text for held in (False, True) for document in world.corpus_half(is_held_out=held).documents()}
    shown = {message["content"] for lesson in lessons for reply in lesson.replies for message in reply}
    assert len(shown & facts) / len(shown) < 0.005  # by chance


def test_names_are_one_token_each(model_dir):
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for word in world.draw_names().all():
        assert tokenizer.encode(word).tokens == [word]
    person = world.corpus_half(is_held_out=True).people[0][0]
    assert len(tokenizer.encode(person.text).ids) == 19


def test_six_attempts_fit_into_the_context_of_the_profile(search, model_dir):
    config = load_config(profile="mr_search_laptop", config_file=None, environ={}, argv_flags=[])
    writer = start_model.DemonstrationWriter(model_dir, argument_names=teacher.ARGUMENT_NAMES)
    busy = teacher.Flaws(gives_up=0, stops_early=0, compares=1, compares_again=0, moves_on=1)
    solved = attempts(search, flaws=busy, num_episodes=6, calls_per_episode=2, count=60)
    longest = max(len(writer.write(lesson).token_ids) for _, lesson in solved)
    assert longest < config.rollout.max_prompt_tokens
    assert config.rollout.max_prompt_tokens + config.rollout.max_new_tokens <= config.inference.context_length
    assert config.rollout.max_turns > config.reflection.tool_calls_per_episode
    assert (config.reflection.reflection_prompt, config.rollout.final_answer_prompt) == (
        teacher.REFLECTION,
        teacher.LAST_CALL,
    )
    assert config.reflection.tool_calls_per_episode == teacher.EPISODE_CALLS
    assert ChatFormat.load(model_dir).vocab_size < 1000


async def test_the_real_server_answers_as_the_teacher_was_answered(search, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(profile="mr_search_laptop", config_file=None, environ={}, argv_flags=[])
    toolbox = await open_toolbox(config.tools)
    person = world.corpus_half(is_held_out=True).people[3][2]
    try:
        for query in (person.first, person.title, person.firm.name, "Xyzzy", f"{person.first} {person.trade}"):
            result = await toolbox.call(
                ToolRequest(call_id="1", name="search", arguments={"query": query}), deadline_s=20
            )
            assert result.content == search.search(query, top_k=1, max_chars=teacher.MAX_RESULT_CHARS)
    finally:
        await toolbox.close()
