"""agent_config.yml: the reference's keys, clear refusals, and keys that never show."""

from __future__ import annotations

import pytest

from agentrl.config.agent_config import load_agent_config
from agentrl.config.load import ASSETS_DIR
from agentrl.errors import ConfigError, UnavailableError

REFERENCE = """
browse_agent:
  models:
    - {api_key: "${BROWSE_KEY}", base_url: "https://a.example/v1/", model: small}
    - {api_key: "literal-key", base_url: "http://b.example/v1", model: large}
  max_retries: 3
  retry_delay: 2
  timeout: 180
  max_prompt_length: 60000
  min_prompt_length: 1500
  browse_tools: [fetch_url, read_file]
  default_purpose: {fetch_url: "Summarize the main content of this page."}
  tokenizer_path: models/tokenizer
  status: true
  enable_logging: false
  extra_body: {temperature: 0.7, chat_template_kwargs: {enable_thinking: false}}
scorer_agent:
  models:
    - {api_key: "${JUDGE_KEY}", base_url: "https://a.example/v1", model: judge}
  max_retries: 5
  retry_delay: 1
  backoff_factor: 2
  timeout: 60
  judge_prompt_template: "{question} | {labeled_answer} | {pred_answer}"
"""
ENVIRON = {"BROWSE_KEY": "browse-secret", "JUDGE_KEY": "judge-secret"}
ONE = "scorer_agent:\n  models: [{base_url: 'http://h/v1', model: m}]\n"


@pytest.fixture
def load(tmp_path):
    def read(text: str, environ=ENVIRON):
        path = tmp_path / "agent_config.yml"
        path.write_text(text, encoding="utf-8")
        return load_agent_config(path, environ=environ)

    return read


def test_every_key_of_the_reference_is_read(load):
    config = load(REFERENCE)
    browser, judge = config.browser, config.judge
    assert browser is not None
    assert judge is not None
    assert [model.model for model in browser.models] == ["small", "large"]
    assert browser.models[0].base_url == "https://a.example/v1"
    assert browser.models[0].api_key.get_secret_value() == "browse-secret"
    assert (browser.max_prompt_length, browser.min_prompt_length) == (60000, 1500)
    assert (judge.max_retries, judge.backoff_factor, judge.timeout) == (5, 2.0, 60.0)


def test_no_key_shows_when_the_configuration_is_printed_or_dumped(load):
    config = load(REFERENCE)
    shown = f"{config!r} {config} {config.model_dump()} {config.model_dump_json()}"
    assert not any(secret in shown for secret in ("browse-secret", "judge-secret", "literal-key"))


def test_what_is_left_out_has_the_reference_defaults(load):
    config = load(ONE)
    assert config.browser is None
    assert (config.judge.max_retries, config.judge.retry_delay, config.judge.backoff_factor) == (5, 1.0, 2.0)


def test_an_agent_that_is_switched_off_is_not_used(load):
    assert load(ONE + "  status: false\n").judge is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scorer_agent: {models: []}", r"scorer_agent\.models: .*at least 1"),
        ("scorer_agent: {model: x}", r"scorer_agent\.models: field required"),
        (ONE + "  max_retrys: 3\n", r"scorer_agent\.max_retrys: extra inputs"),
        (ONE + "  timeout: 0\n", r"scorer_agent\.timeout: .*greater than 0"),
        (ONE + "  judge_prompt_template: '{question} {labeled_answer}'\n", r"\{pred_answer\} is missing"),
        (ONE + "  judge_prompt_template: '{labeled_answer} {pred_answer} {x}'\n", r"\{x\} is not known"),
        (ONE + "  judge_prompt_template: '{labeled_answer} {pred_answer} {'\n", "braces that are text"),
        (ONE + "  extra_body: {stream: true}\n", "stream is set by the client itself"),
        ("scorer_agent: {models: [{base_url: 'h/v1', model: m}]}", r"models\[0\]\.base_url: needs the form"),
        ("scorer_agent: {models: [{base_url: 'http://u:p@h', model: m}]}", "without a password"),
        ("scorer_agent: {models: [{base_url: 'http://[::1', model: m}]}", "needs the form"),
        ("scorer_agent: {models: [{base_url: 'http://h:99999/v1', model: m}]}", "needs the form"),
        ("scorer_agent: {models: [{base_url: 'http://h o/v1', model: m}]}", "needs the form"),
        ("scorer_agent: {models: [{base_url: 'http://\u2603/v1', model: m}]}", "needs the form"),
        ("judge: {}", "judge: extra inputs"),
        ("[1]", "top-level keys"),
        ("a: [", "not valid YAML in line"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(load, text, message):
    with pytest.raises(ConfigError, match=message):
        load(text)


def test_a_variable_that_is_not_set_is_named_with_its_place(load):
    with pytest.raises(ConfigError, match=r"browse_agent\.models\[0\]\.api_key names \$\{BROWSE_KEY\}.*not set"):
        load(REFERENCE, environ={"JUDGE_KEY": "x"})


def test_a_refusal_never_quotes_a_key(load):
    text = "scorer_agent: {models: [{base_url: 'http://h/v1', model: m, api_key: [topsecret]}]}"
    with pytest.raises(ConfigError, match="api_key") as caught:
        load(text)
    assert "topsecret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load("scorer_agent: {models: [{api_key: 'topsecret}]}")
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-planted\\r", "sk-planted\\n", "sk-\\0planted", "sk-plant\u00e9", " sk-planted"])
def test_a_key_that_no_header_can_carry_is_refused_without_quoting_it(load, key):
    with pytest.raises(ConfigError, match=r"models\[0\]\.api_key: a key is printable ASCII") as caught:
        load(f'scorer_agent: {{models: [{{base_url: "http://h/v1", model: m, api_key: "{key}"}}]}}')
    assert "plant" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnavailableError, match="there is no such file"):
        load_agent_config(tmp_path / "none.yml", environ={})


def test_the_file_that_is_shipped_is_one():
    environ = {"JUDGE_API_KEY": "k", "JUDGE_BASE_URL": "https://h/v1", "JUDGE_MODEL": "m"}
    config = load_agent_config(ASSETS_DIR / "agent_config.yml", environ=environ)
    assert config.judge is not None
