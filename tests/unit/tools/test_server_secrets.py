"""Keys in command lines and addresses."""

import pytest

from agentrl.tools.server_secrets import secrets_of


@pytest.mark.parametrize(
    "args",
    [
        ["run", "--api-key", "planted"],
        ["--openai_api_key=planted"],
        ["-e", "SEARCH_API_KEY=planted"],
        ["mcp-remote", "https://h/mcp", "--header", "Authorization: Bearer planted"],
        ["--header", "X-Api-Key:planted"],
        ["--header=X-Api-Key: planted"],
        ["server-postgres", "postgresql://reader:planted@db.example.org:5432/facts"],
        ["--url=https://h/mcp?exaApiKey=planted&lang=en"],
        ["--client-secret", "planted", "--verbose"],
    ],
)
def test_a_key_in_an_argument_is_known(args):
    assert "planted" in secrets_of(args=args, url="")


def test_a_key_in_an_address_is_known_as_written_and_decoded():
    found = secrets_of(args=[], url="https://user:p%40ssword@h/mcp?q=1;token=t%2Foken")
    assert found == {"p%40ssword", "p@ssword", "t%2Foken", "t/oken"}


@pytest.mark.parametrize(
    "args",
    [
        ["--keyword", "python3", "--author", "somebody"],
        ["--token-limit", "100000", "--tokenizer", "bert-base"],
        ["--key", "--value"],
        ["-m", "agentrl.tools.servers.search", "--corpus", "keys=values"],
        ["https://example.org:8080/a@b"],
    ],
)
def test_what_is_no_key_is_left_alone(args):
    assert secrets_of(args=args, url="") == frozenset()
