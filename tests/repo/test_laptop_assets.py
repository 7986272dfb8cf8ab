"""The laptop profile's world, tokenizer, demonstrations and untrained model (assets/laptop)."""

import importlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.chat import ChatFormat, parse_completion
from agentrl.config.load import load_config
from agentrl.rollout.dataset import load_task_rows
from agentrl.scoring import MCPScorerFactory, extract_answer
from agentrl.tools import open_toolbox
from agentrl.types import ToolRequest, ToolSpec

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "assets" / "laptop"
CORPUS = ROOT / "src" / "agentrl" / "tools" / "servers" / "corpus.jsonl"
sys.path.insert(0, str(LAPTOP))
world, teacher, tokenizer_module, start_model, start, tasks = (
    importlib.import_module(name)
    for name in (
        "laptop_world", "laptop_teacher", "laptop_tokenizer", "start_model", "build_start", "generate_tasks",
    )
)  # fmt: skip
INNERMOST = re.compile(r"(\d+)[-+*](\d+)")
TOOLS = [
    ToolSpec(name="search", description="look up", parameters={"type": "object"}),
    ToolSpec(name="calculator", description="compute", parameters={"type": "object"}),
]


@pytest.fixture(scope="module")
def tools():
    return world.Tools()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("laptop") / "model"
    start.write_model(directory, seed=3)
    return directory


@pytest.fixture(scope="module")
def chat(model_dir):
    return ChatFormat.load(model_dir)


@pytest.fixture(scope="module")
def lessons(tools):
    return list(teacher.Teacher(tools, rng=random.Random(5)).lessons(3000))


def generate(folder, *, seed):
    command = [sys.executable, LAPTOP / "generate_tasks.py", "--seed", str(seed)]
    files = [folder / "new" / "train.jsonl", folder / "new" / "heldout.jsonl"]
    subprocess.run([*command, "--train_file", files[0], "--eval_file", files[1]], check=True, timeout=60)
    return files


def source_of(query):
    """What decides whether a question is held out: its innermost operand pair, or its entity."""
    pair = INNERMOST.search(query)
    name = re.search(r"has ([A-Z][a-z]+)", query)
    return name[1] if name else pair.groups()


def test_task_files_load_and_repeat_with_their_seed(tmp_path):
    files = generate(tmp_path / "a", seed=4)
    again = generate(tmp_path / "b", seed=4)
    other = generate(tmp_path / "c", seed=5)
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]
    assert [path.read_bytes() for path in files] != [path.read_bytes() for path in other]
    rows = load_task_rows(files[0], known_scorers=MCPScorerFactory.names())
    assert len(rows) == tasks.NUM_TRAIN
    assert {(row.scorer, row.answer_schema) for row in rows} == {("em", "answer"), ("math", "boxed")}
    assert {row.metadata["hops"] for row in rows} == {1, 2, 3}
    kinds = Counter(row.metadata["kind"] for row in rows)
    assert 0.06 <= (kinds["search"] + kinds["search_calculator"]) / len(rows) <= 0.16


@pytest.mark.parametrize("seed", range(3))
def test_held_out_tasks_share_no_question_operand_pair_or_entity_with_training(seed):
    train, held_out = (
        [row["query"] for row in tasks.task_rows(seed, count=count, is_held_out=is_held_out)]
        for count, is_held_out in ((tasks.NUM_TRAIN, False), (tasks.NUM_EVAL, True))
    )
    assert len(set(train)) == tasks.NUM_TRAIN
    assert len(set(held_out)) == tasks.NUM_EVAL
    assert not set(map(source_of, train)) & set(map(source_of, held_out))


def test_every_answer_is_right():
    facts = {row["title"]: row.get("bridges", row.get("trucks")) for row in map(json.loads, CORPUS.open())}
    for row in [row for held in (False, True) for row in tasks.task_rows(1, count=400, is_held_out=held)]:
        found = re.fullmatch(r"How many (?:bridges|trucks) has (\w+?)(?: plus (\d+))?\?", row["query"])
        if found:
            expected = facts[found[1]] + int(found[2] or 0)
        else:
            expected = eval(re.fullmatch(r"What is ([-+*()\d]+)\?", row["query"])[1])
        assert row["answer"] == str(expected), row


def test_demonstrations_never_show_a_held_out_problem(lessons):
    held_out = {source_of(row["query"]) for row in tasks.task_rows(1, count=1000, is_held_out=True)}
    shown = {source_of(lesson.query) for lesson in lessons if not lesson.is_drill}
    assert len(shown) > 500
    assert not shown & held_out


def test_the_teacher_is_right_about_a_third_of_the_time(lessons):
    problems = [lesson for lesson in lessons if not lesson.is_drill]
    assert len(problems) / len(lessons) == pytest.approx(1 - teacher.DRILL_SHARE, abs=0.04)
    assert np.mean([lesson.is_correct for lesson in problems]) == pytest.approx(0.305, abs=0.04)


def test_the_teacher_decides_badly_but_never_copies_badly(lessons):
    for lesson in lessons:
        if lesson.is_drill:
            assert lesson.completions == (lesson.query,)
            continue
        known = set(re.findall(r"\d+|[A-Z][a-z]+", lesson.query))
        for completion, (_, result) in zip(lesson.completions, lesson.results, strict=False):
            (call,) = parse_completion(completion).tool_calls
            (argument,) = call.arguments.values()
            assert set(re.findall(r"\d+|[A-Z][a-z]+", argument)) <= known
            known |= set(re.findall(r"\d+", result))
        schema = "boxed" if "boxed" in lesson.completions[-1] else "answer"
        answer = extract_answer(lesson.completions[-1], schema=schema)
        numbers = re.findall(r"-?\d+", lesson.results[-1][1]) if lesson.results else ["unknown"]
        assert answer == numbers[-1]


def test_a_teacher_without_flaws_is_always_right(tools):
    flawless = teacher.Flaws(gives_up=0, stops_early=0, starts_wrong=0, forgets_box=0)
    drawn = world.World(tools.counts(), is_held_out=True, mix=world.TASK_MIX)
    rng = random.Random(2)
    problems = [drawn.draw(rng) for _ in range(300)]
    attempts = [teacher.Teacher(tools, rng=rng, flaws=flawless).solve(problem) for problem in problems]
    assert all(lesson.is_correct for lesson in attempts)
    assert [len(lesson.results) for lesson in attempts] == [len(problem.calls) for problem in problems]


@given(st.text() | st.lists(st.sampled_from([*tokenizer_module.TEXT_TAGS, *tokenizer_module.CHAT_TAGS, "x", "\n"])))
def test_any_text_is_representable_and_never_becomes_a_tag(chat, text):
    text = "".join(text)
    ids = chat.encode_text(text)
    assert chat.decode(ids) == text
    assert all(
        token < chat.vocab_size - len(tokenizer_module.TEXT_TAGS) - len(tokenizer_module.CHAT_TAGS) for token in ids
    )


def test_names_operands_and_call_pieces_are_one_token_each(model_dir, tools):
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for word in [*tools.names(), *map(str, range(1, 100))]:
        assert tokenizer.encode(word).tokens == [word]
        assert tokenizer.encode(f"has {word}?").tokens[-2] == word
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "183*24"}}\n</tool_call><|im_end|>'
    pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.encode(call).ids]
    assert pieces == [
        "<tool_call>", '\n{"name": "', "calculator", '", "arguments": {"', "expression", '": "', "18", "3", "*", "24",
        '"}}\n', "</tool_call>", "<|im_end|>",
    ]  # fmt: skip


def test_transformers_and_the_rollout_render_the_same_ids(model_dir, chat):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert chat.stop_token_ids == (tokenizer.eos_token_id,)
    question = [{"role": "system", "content": "Put the answer in a box."}, {"role": "user", "content": "What is 3*4?"}]
    function = {"name": "calculator", "arguments": {"expression": "3*4"}}
    answered = [
        *question,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "12"},
        {"role": "tool", "tool_call_id": "2", "content": "No results."},
    ]
    openai_tools = [tool.as_openai() for tool in TOOLS]
    for messages, offered in ((question, TOOLS), (question, []), (answered, TOOLS)):
        expected = tokenizer.apply_chat_template(
            messages, tools=openai_tools if offered else None, add_generation_prompt=True, return_dict=False
        )
        assert list(chat.render_prompt(messages, tools=offered)) == expected


def test_a_demonstration_reads_like_the_rollout_and_trains_exactly_the_assistant(model_dir, chat):
    lesson = teacher.Lesson(
        system_prompt="Put the answer in a box.",
        query="What is (37+24)*3?",
        completions=(
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37+24"}}\n</tool_call>',
            "\\boxed{61}",
        ),
        results=(("calculator", "61"),),
    )
    row = start_model.DemonstrationWriter(model_dir, argument_names=teacher.ARGUMENT_NAMES).write(lesson)
    assert chat.decode(row.token_ids) == (
        "<|im_start|>system\nPut the answer in a box.\nTools: calculator, search<|im_end|>\n"
        "<|im_start|>user\nWhat is (37+24)*3?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37+24"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n61\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
        "\\boxed{61}<|im_end|>"
    )
    trained = [token for token, is_trained in zip(row.token_ids, row.weights, strict=True) if is_trained]
    assert chat.decode(trained) == "".join(f"{completion}<|im_end|>" for completion in lesson.completions)


def test_demonstrations_repeat_with_their_seed_and_stay_short(model_dir):
    rows, again, other = (list(start.demonstrations(seed, 300, model_dir=model_dir)) for seed in (1, 1, 2))
    assert rows == again
    assert rows != other
    assert max(len(row.token_ids) for row in rows) < 160
    assert all(len(row.token_ids) == len(row.weights) and row.weights[-1] for row in rows)


def test_the_command_writes_what_the_launcher_inserts(tmp_path):
    command = [sys.executable, LAPTOP / "build_start.py", "--out", tmp_path, "--seed", "2", "--count", "20"]
    subprocess.run(command, check=True, timeout=90, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").open()]
    expected = start.demonstrations(2, 20, model_dir=tmp_path / "model")
    assert [tuple(row["token_ids"]) for row in rows] == [row.token_ids for row in expected]
    assert len({row["id"] for row in rows}) == 20
    assert {weight for row in rows for weight in row["weights"]} == {0, 1}


def test_the_untrained_model_loads_and_passes_on_what_it_looks_at(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert model.config.vocab_size == tokenizer.get_vocab_size()
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    for layer in model.model.layers:
        passed_on = layer.self_attn.o_proj.weight @ layer.self_attn.v_proj.weight
        assert torch.allclose(passed_on, torch.eye(start.SIZE.hidden_size), atol=1e-5)
    again = start_model.build_model(tokenizer, size=start.SIZE, seed=3).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
    other = start_model.build_model(tokenizer, size=start.SIZE, seed=4).state_dict()
    assert not torch.equal(other["model.embed_tokens.weight"], again["model.embed_tokens.weight"])


async def test_the_real_servers_answer_as_the_teacher_was_answered(tools, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(profile="laptop", config_file=None, environ={}, argv_flags=[])
    toolbox = await open_toolbox(config.tools)
    try:
        assert {tool.name for tool in toolbox.list_tools()} == set(teacher.ARGUMENT_NAMES)
        entity = min(tools.counts())
        for name, argument in (("calculator", "37*24"), ("calculator", "3-9"), ("search", entity), ("search", "Xyzzy")):
            request = ToolRequest(call_id="1", name=name, arguments={teacher.ARGUMENT_NAMES[name]: argument})
            result = await toolbox.call(request, deadline_s=20)
            assert result.content == tools.call(name, argument)
    finally:
        await toolbox.close()


def test_a_rollout_of_the_profile_never_outgrows_its_limits(lessons, model_dir):
    config = load_config(profile="laptop", config_file=None, environ={}, argv_flags=[])
    writer = start_model.DemonstrationWriter(model_dir, argument_names=teacher.ARGUMENT_NAMES)
    longest_call = max(
        len(writer.write(lesson).token_ids) for lesson in lessons if not lesson.is_drill and len(lesson.results) == 3
    )
    assert longest_call < config.rollout.max_prompt_tokens
    assert config.rollout.max_turns > 3
    assert config.rollout.max_prompt_tokens + config.rollout.max_new_tokens <= config.inference.context_length
