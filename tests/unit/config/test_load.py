import json
import os
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.config import load as module
from agentrl.config.compatibility import UNAVAILABLE, known_names, translated_names
from agentrl.config.load import load_config, split_flags
from agentrl.config.settings import settings_index
from agentrl.errors import ConfigError

# The names users of AgentRL know; all must keep working, or be refused with a reason.
LEGACY_NAMES = """
model_name_or_path db_connection_string train_file mcp_manager_url mcp_server_name agent_config_path run_name output_dir
loss_calculater token_level_loss strict_in_bound skip_length_normalization epsilon epsilon_higher beta1 beta2
importance_weight_cap_ratio out_of_date_decay adv_scaling num_generations max_new_tokens max_prompt_tokens max_tokens
max_turns min_turns tool_call_parser preferred_sampling_params presence_penalty frequency_penalty target_concurrency
max_concurrent_samples_per_process repetition_early_stop_times enable_repetition_compress new_context
resample_error_records enable_sampling sync_sampling drop_zero_advantage skip_non_positive_advantage minimal_advantage
balance_sample max_trained_count retrained_interval tp_size pp_size ep_size cp_size inf_tp_size inf_ep_size
inf_mem_ratio per_device_train_batch_size gradient_accumulation_steps dynamic_batching pad_to_multiple_of learning_rate
weight_decay optim_args lr_scheduler_type warmup_steps max_grad_norm max_steps num_train_epochs save_steps
save_only_model save_total_limit resume_from_checkpoint logging_steps report_to bf16 seed eval_strategy eval_steps
loss_seq_chunk_size activation_offloading gradient_checkpointing
"""


def load(*flags: str, environ: dict[str, str] | None = None, file: Path | None = None, profile: str | None = None):
    return load_config(profile=profile, config_file=file, environ=environ or {}, argv_flags=flags)


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "assets" / "profiles"
    folder.mkdir(parents=True)
    monkeypatch.setattr(module, "ASSETS_DIR", folder.parent)
    return folder


def test_nothing_given_is_the_defaults():
    assert load() == RunConfig()


def test_each_source_wins_over_the_one_before(profiles, tmp_path):
    (profiles / "small.yml").write_text("seed: 1\nmax_steps: 1\nmax_turns: 1\nnum_generations: 2\n")
    file = tmp_path / "run.yaml"
    file.write_text("max_steps: 2\nmax_turns: 2\nnum_generations: 3\n")
    environ = {"AGENTRL_MAX_TURNS": "3", "AGENTRL_NUM_GENERATIONS": "4"}
    config = load("--num_generations", "5", environ=environ, file=file, profile="small")
    assert (config.run.seed, config.train.max_steps, config.rollout.max_turns, config.rollout.num_generations) == (
        1,
        2,
        3,
        5,
    )
    assert config.run.profile == "small"


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_the_profile_may_be_named_in_any_source(profiles, tmp_path, source):
    (profiles / "small.yml").write_text("max_steps: 7\n")
    file = tmp_path / "run.yaml"
    file.write_text("profile: small\n" if source == "file" else "")
    flags = ("--profile", "small") if source == "flag" else ()
    config = load(*flags, environ={"AGENTRL_PROFILE": "small"} if source == "environment" else {}, file=file)
    assert config.train.max_steps == 7
    assert config.run.profile == "small"


def test_an_unknown_profile_is_refused_with_the_ones_there_are(profiles):
    (profiles / "small.yml").write_text("")
    with pytest.raises(ConfigError, match=r'--profile = "big": no such profile; known: small'):
        load(profile="big")


def test_a_file_may_use_sections_or_leaf_names(tmp_path):
    nested, flat = tmp_path / "nested.yaml", tmp_path / "flat.yaml"
    nested.write_text("train: {learning_rate: 1e-4}\nloss: {loss: CISPO}\n")
    flat.write_text("learning_rate: 1e-4\nloss: CISPO\n")
    assert load(file=nested) == load(file=flat)
    assert load(file=flat).train.learning_rate == 1e-4


def test_a_dumped_configuration_loads_to_the_same(tmp_path):
    config = load("--learning_rate", "3e-5", "--sync_sampling", "--loss_calculater", "MINIRL", "--report_to", "none")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    assert load(file=file) == config


@pytest.mark.parametrize(
    "tokens",
    [
        ["--learning_rate", "1e-4"],
        ["--learning-rate", "1e-4"],
        ["--learning_rate=1e-4"],
        ["--learning-rate=0.0001"],
    ],
)
def test_flags_may_be_written_with_dashes_and_equals(tokens):
    assert load(*tokens).train.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(["--bf16"], True), (["--bf16", "true"], True), (["--bf16", "False"], False), (["--bf16=0"], False)],
)
def test_boolean_flags_stand_alone_or_with_a_word(tokens, expected):
    assert load(*tokens, "--max_steps", "3").model.bf16 is expected


def test_values_that_look_like_numbers_below_zero_are_values():
    assert load("--repetition_early_stop_times", "-1").rollout.repetition_early_stop_times == -1


def test_json_values_are_read(tmp_path):
    config = load("--preferred_sampling_params", '{"temperature": 0.5, "top_p": 0.9}')
    assert config.inference.preferred_sampling_params == {"temperature": 0.5, "top_p": 0.9}


def test_optional_settings_can_be_cleared():
    assert load("--inference_url", "none", environ={"INFERENCE_URL": "http://a:1"}).inference.inference_url is None


def test_the_well_known_plain_variables_work_and_prefixed_ones_win():
    environ = {
        "MODEL_NAME_OR_PATH": "m",
        "TRAIN_FILE": "t",
        "INFERENCE_URL": "http://a:1",
        "MCP_MANAGER_URL": "http://b:1",
    }
    config = load(environ={**environ, "DB_CONNECTION_STRING": "mongodb://c", "AGENTRL_TRAIN_FILE": "u"})
    assert config.model.model_name_or_path == Path("m")
    assert config.run.train_file == Path("u")
    assert config.inference.inference_url == "http://a:1"
    assert config.tools.mcp_manager_url == "http://b:1"
    assert config.store.db_connection_string == "mongodb://c"


def test_empty_variables_count_as_not_set():
    assert load(environ={"AGENTRL_MAX_STEPS": "", "TRAIN_FILE": ""}) == RunConfig()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--learning_rate", "fast"], r'--learning_rate = "fast": .*number > 0.*--learning_rate 1e-06'),
        (["--learning_rate", "-1"], r'--learning_rate = "-1": .*greater than 0'),
        (["--max_steps", "2.5"], r'--max_steps = "2.5": .*integer >= 1'),
        (["--loss", "PPO"], r"loss = PPO: there is no such loss; did you mean \w+\? Known are GRPO, .*loss_module"),
        (["--learnin_rate", "1"], r"--learnin_rate: no such setting; did you mean --learning_rate\?"),
        (["--qqqqq", "1"], r"--qqqqq: no such setting; all names are in docs/configuration.md"),
        (["--max_steps"], r"--max_steps: needs a value"),
        (["--bf16", "maybe"], r'--bf16 "maybe": not a value it takes'),
        (["--preferred_sampling_params", "{"], r"no JSON"),
        (["--num_generations", "1"], r"num_generations = 1: a group baseline needs at least 2"),
        (["--aggregation", "constant"], r'aggregation = "constant" needs constant_length'),
        (["--learning_rate", "inf"], r'--learning_rate = "inf": .*finite number'),
        (["--presence_penalty", "nan"], r'--presence_penalty = "nan": .*finite number'),
        (["--db_timeout_s", "1e999"], r"finite number"),
        (["--max_steps", "9" * 30], r"does not fit 64 bits"),
        (["--seed", "-1"], r"greater than or equal to 0"),
        (["--preferred_sampling_params", '{"temperatur": 1}'], r"temperatur is not known; there are temperature,"),
        (["--preferred_sampling_params", '{"top_p": 2}'], r"top_p = 2 is not from 0 to 1"),
        (["--preferred_sampling_params", '{"min_p": NaN}'], r"finite number"),
        (["--preferred_sampling_params", "[" * 10_000], r"no JSON"),
        (["--inference_url", "localhost:30000"], r"inference_url: every address.*http://host:port"),
        (["--lease_s", "1", "--heartbeat_s", "5"], r"lease_s = 1, heartbeat_s = 5: claims would lapse"),
        (["--min_turns", "9", "--max_turns", "3"], r"min_turns = 9, max_turns = 3: no correct Record would be trained"),
        (["--max_new_tokens", "2000"], r"max_new_tokens = 2000, context_length = 1024: no prompt would fit"),
        (["--cispo_clip_low", "9"], r"cispo_clip_low = 9 is above cispo_clip_high = 5"),
        (["--pad_to_multiple_of", "1000000"], r"pad_to_multiple_of = 1000000, max_tokens = \d+: every pass would be"),
        (["--is_cap", "5"], r"is_cap = 5.0: loss = 'GRPO' does not look at it"),
        (["--gradient_accumulation_steps", "\u00b2"], r"needs a whole number from 1"),
        (["--run_name", "local"], r"run_name = local: MongoDB keeps its own data"),
    ],
)
def test_a_wrong_flag_is_one_line_with_name_value_and_way_out(tokens, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(*tokens)
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_and_a_wrong_key_are_named_as_the_user_wrote_them(tmp_path):
    with pytest.raises(ConfigError, match=r'environment AGENTRL_MAX_STEPS = "x"'):
        load(environ={"AGENTRL_MAX_STEPS": "x"})
    with pytest.raises(ConfigError, match=r"environment AGENTRL_MAX_STEP: no such setting; did you mean --max_steps"):
        load(environ={"AGENTRL_MAX_STEP": "3"})
    file = tmp_path / "run.yaml"
    file.write_text("train: {max_stepss: 3}\n")
    with pytest.raises(ConfigError, match=r"run.yaml: max_stepss: no such setting; did you mean --max_steps"):
        load(file=file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "not valid YAML"),
        (b"- a", "holds a list"),
        (b"store: {max_steps: 3}", "belongs to section train"),
        (b"store:\n  - 3", "run.yaml: store: no such setting"),
        (b"system_prompt: caf\xe9", "not valid YAML"),
        (b"seed: \x00", "not valid YAML"),
        (b"a: " + b"[" * 5000, "not valid YAML"),
        (b"seed: 2026-99-99", "not valid YAML"),
        (b"learning_rate: [1]", "learning_rate = .*valid number"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, content, message):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(file=file)


def test_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml.*cannot be read"):
        load(file=tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("name", LEGACY_NAMES.split())
def test_every_name_users_know_is_a_setting_a_translation_or_refused_with_a_reason(name):
    assert name in settings_index() or name in translated_names() or UNAVAILABLE[name].reason


def test_every_setting_round_trips_through_its_own_flag():
    defaults = {name: setting.default for name, setting in settings_index().items() if setting.default is not None}
    flags = []
    for name, value in defaults.items():
        flags += [f"--{name}", json.dumps(value) if isinstance(value, bool | dict) else str(value)]
    assert load(*flags) == RunConfig()


def test_split_flags_leaves_positionals_and_foreign_options():
    rest, flags = split_flags(["demo", "--once", "--bf16", "train:0:a/g1", "--max_steps", "3", "--unknown", "--seed=1"])
    assert rest == ["demo", "--once", "train:0:a/g1", "--unknown"]
    assert flags == ["--bf16", "--max_steps", "3", "--seed=1"]


def test_this_environment_has_no_unknown_settings():
    load_config(profile=None, config_file=None, environ=os.environ, argv_flags=())
    assert "profile" in known_names()


def test_a_profile_named_in_a_file_can_be_cleared_by_a_flag(profiles, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("profile: nowhere\n")
    assert load("--profile", "none", file=file).run.profile is None
