"""What section `reflection` asks for fits together, and fits the credit that section `algo` gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.load import load_config
from agentrl.errors import ConfigError


def load(*flags: str) -> object:
    return load_config(profile=None, config_file=None, environ={}, argv_flags=flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--episode_unit step --episodes 3", "nothing is reflected on between them"),
        ("--reflect_when wrong", "there is nothing to reflect on"),
        ("--reflection_context last_k", "there is nothing to reflect on"),
        ("--advantage turn_rloo --improvement_bonus 0.5", "tell episodes apart, and there is one"),
        ("--advantage turn_rloo --episodes 3 --episode_reward_mask [0,1]", "has 2 entries, episodes = 3"),
        ("--advantage turn_rloo --episode_unit step --episode_reward_mask [1]", "differ in their number of steps"),
        (
            "--advantage turn_rloo --episodes 2 --reflect_when wrong --episode_reward_mask [0,1]",
            "no later episodes to earn from",
        ),
        ("--episode_reward_mask 0,1", "no JSON"),
        ("--episodes 1000000000", "less than or equal to 1000"),
        ("--episodes 3 --keep_episodes 2", "all episodes are kept"),
        ("--advantage turn_rloo --gamma 0.5", "later episodes are discounted, and there is one"),
        (
            "--sampler_module own.py --advantage turn_rloo --episodes 3 --episode_reward_mask [0,1]",
            "has 2 entries, episodes = 3",
        ),
    ],
)
def test_settings_without_a_sense_are_refused_in_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as caught:
        load(*flags.split())
    assert "\n" not in str(caught.value)


def test_a_request_to_reflect_that_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="only spaces"):
        load("--episodes", "2", "--reflection_prompt", "  ")


def test_the_variants_of_the_method_are_flags_and_keys_of_a_file(tmp_path: Path) -> None:
    flags = "--episodes 4 --episode_reward_mask [0,0,1,1] --advantage turn_rloo --tool_calls_per_episode 3"
    from_flags = load(*flags.split())
    file = tmp_path / "run.yaml"
    file.write_text(
        "reflection: {episodes: 4, tool_calls_per_episode: 3}\n"
        "algo: {advantage: turn_rloo, episode_reward_mask: [0, 0, 1, 1]}\n"
    )
    from_file = load_config(profile=None, config_file=file, environ={}, argv_flags=[])
    assert from_file == from_flags
    assert from_file.algo.episode_reward_mask == [0.0, 0.0, 1.0, 1.0]
