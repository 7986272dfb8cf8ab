"""What the documentation says exists: commands, flags, files; and what is generated is up to date."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from agentrl.cli.main import COMMANDS
from agentrl.config import docs
from agentrl.config.load import load_config, split_flags

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")])


def shell_commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def agentrl_calls(page: Path) -> list[list[str]]:
    calls = []
    for words in shell_commands(page):
        for position, word in enumerate(words):
            if Path(word).name == "agentrl" or word == "agentrl.cli.main":
                calls.append(words[position + 1 :])
                break
    return calls


def test_the_configuration_page_is_up_to_date():
    assert docs.DOCUMENT.read_text(encoding="utf-8") == docs.render()


def test_the_readme_starts_with_two_commands_that_exist():
    commands = shell_commands(ROOT / "README.md")
    assert commands[0][0] == "./grpo_example.sh"
    assert commands[1] == ["bash", "tests/run.sh"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_named_in_shell_blocks_exist(page):
    for words in shell_commands(page):
        for word in words:
            if word.endswith(".sh") or word.startswith(("./", "deploy/", "assets/", "tests/")):
                assert (ROOT / word).exists(), (page, words)


def own_flags(command: str) -> set[str]:
    """Flags of a command that are no settings."""
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[command].module).add_arguments(parser)
    return {"--config", *(flag for action in parser._actions for flag in action.option_strings)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_agentrl_commands_and_their_settings_exist(page):
    for words in agentrl_calls(page):
        name, *rest = words
        assert name in COMMANDS, words
        own, flags = split_flags(rest)
        load_config(profile=None, config_file=None, environ={}, argv_flags=flags)
        assert not [word for word in own if word.startswith("--") and word not in own_flags(name)], words


def test_the_readme_shows_agentrl_commands():
    assert len(agentrl_calls(ROOT / "README.md")) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        assert (page.parent / target).exists(), (page, target)


def test_paths_in_the_file_map_exist():
    for page, prefix in ((ROOT / "README.md", ROOT), (ROOT / "docs" / "architecture.md", ROOT / "src" / "agentrl")):
        rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        for path in re.findall(r"`((?:src/|assets/|[a-z]+/)[\w./]*)`", "\n".join(rows)):
            assert (ROOT / path).exists() or (prefix / path).exists() or (ROOT / "src/agentrl" / path).exists(), path


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/*.yml")), ids=lambda path: path.name)
def test_compose_files_have_health_checks_and_no_default_password(path):
    text = path.read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]
    one_shot = {"keyfile", "initiate", "install"}
    assert all("healthcheck" in service for name, service in services.items() if name not in one_shot)
    assert not re.search(r"PASSWORD:?-", text)
    for service in services.values():
        assert "@" not in str(service.get("command", ""))
