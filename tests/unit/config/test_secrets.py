import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.config.secrets import masked, masked_uri, masked_uris, secret_settings


def load(*flags: str) -> RunConfig:
    return load_config(profile=None, config_file=None, environ={}, argv_flags=flags)


def test_masking_hides_passwords_and_tokens_and_nothing_else():
    config = load(
        *("--db_connection_string", "mongodb://ann:s3cret@db:27017/?w=majority"),
        *("--mcp_auth_token", "abc", "--mcp_manager_url", "http://h/mcp?api_key=xyz&a=1"),
    )
    shown = masked(config)
    assert shown["store"]["db_connection_string"] == "mongodb://ann:***@db:27017/?w=majority"
    assert shown["tools"]["mcp_auth_token"] == "***"
    assert shown["tools"]["mcp_manager_url"] == "http://h/mcp?api_key=***&a=1"
    text = json.dumps(shown)
    assert not any(secret in text for secret in ("s3cret", "abc", "xyz"))
    assert masked(RunConfig())["tools"]["mcp_auth_token"] is None


@pytest.mark.parametrize("password", ["p", "p@w", "p:w", "%40"])
def test_masked_uris_hide_any_password(password):
    assert masked_uri(f"mongodb://u:{password}@h:1,i:2/?a=b") == "mongodb://u:***@h:1,i:2/?a=b"


def test_a_password_that_should_have_been_escaped_is_hidden_too():
    for text in (
        "mongodb://u:a/sEc@h/",
        "mongodb://u:a sEc@h",
        "mongodb://u:a?sEc#b@h/db",
        "u:sEc@h",
        "mongodb://:sEc@h",
    ):
        assert "sEc" not in masked_uri(text)
        assert masked_uri(text).startswith(text.partition(":")[0])


def test_every_address_of_a_list_is_masked_and_one_without_secrets_stays_as_it_is():
    assert masked_uris("http://a:s1@h:1,https://b:s2@i/v?x=1") == "http://a:***@h:1,https://b:***@i/v?x=1"
    assert masked_uris("http://h:30000,http://h:30001") == "http://h:30000,http://h:30001"
    for plain in ("mongodb://a:27017,b:27018/?replicaSet=agentrl", "mongodb://h/?w=1"):
        assert masked_uri(plain) == plain


@given(
    scheme=st.sampled_from(["mongodb://", "mongodb+srv://", "http://", ""]),
    user=st.text("abc/@.%+-", max_size=8),
    password=st.text(max_size=30).map(lambda text: f"sEc{text}sEc"),
    rest=st.sampled_from(["h", "h:1,i:2/db?w=1", "h/"]),
)
@example(scheme="mongodb://", user="ann@corp", password="sEca,b://c/sEc", rest="h")
@example(scheme="mongodb://", user="a/b", password="sEc:@/sEc", rest="h")
def test_no_part_of_a_password_is_shown_whatever_it_and_the_user_contain(scheme, user, password, rest):
    shown = masked_uri(f"{scheme}{user}:{password}@{rest}")
    assert shown == f"{scheme}{user}:***@{rest}"


@pytest.mark.parametrize("name", ["api_key", "apikey", "access_token", "key", "X-Amz-Signature", "client_secret"])
def test_secret_query_parameters_are_hidden_under_any_usual_name(name):
    assert masked_uri(f"https://h/mcp?a=1&{name}=s3cret&b=2") == f"https://h/mcp?a=1&{name}=***&b=2"


def test_the_session_token_of_a_database_in_the_cloud_is_hidden():
    shown = masked_uri("mongodb://h/?authMechanismProperties=CANONICALIZE:true,AWS_SESSION_TOKEN:s3cret&w=1")
    assert shown == "mongodb://h/?authMechanismProperties=CANONICALIZE:true,AWS_SESSION_TOKEN:***&w=1"


def test_ordinary_text_is_never_taken_for_a_secret():
    config = load("--system_prompt", "Write to bob:x@example.org?token=1")
    assert masked(config)["rollout"]["system_prompt"] == "Write to bob:x@example.org?token=1"


def test_the_settings_that_hold_secrets_are_known_by_name():
    config = load("--mcp_auth_token", "abc", "--inference_url", "http://u:p@h:1", "--mcp_manager_url", "http://h/mcp")
    assert secret_settings(config) == {"mcp_auth_token": "abc", "inference_url": "http://u:p@h:1"}
