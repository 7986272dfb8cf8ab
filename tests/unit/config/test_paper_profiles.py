"""The profiles at the paper's scale say what the paper and its released scripts say, and hang together."""

import pytest

from agentrl.config.load import ASSETS_DIR, load_config
from agentrl.tools import load_server_configs


def profile(name: str, *flags: str):
    return load_config(profile=name, config_file=None, environ={}, argv_flags=list(flags))


def test_mr_search_is_configured_as_in_the_paper():
    config = profile("mr_search_paper")
    assert (config.reflection.episodes, config.rollout.num_generations, config.rollout.max_turns) == (3, 5, 3)
    assert (config.reflection.reflect_when, config.reflection.reflection_context) == ("always", "full")
    assert (config.rollout.max_new_tokens, config.rollout.max_prompt_tokens) == (1024, 8192)
    assert config.inference.context_length == 8192 + 1024
    assert not config.rollout.force_final_answer
    assert (config.algo.advantage, config.algo.gamma) == ("turn_rloo", 1.0)
    assert (config.algo.outcome_weight, config.algo.improvement_bonus, config.algo.episode_reward_mask) == (0, 0, [])
    loss = config.loss
    assert (loss.loss, loss.epsilon, loss.epsilon_higher, loss.dual_clip) == ("GRPO", 0.2, 0.0, 3.0)
    assert (loss.aggregation, loss.kl_coef, loss.entropy_coef) == ("token_mean", 0.0, 0.0)
    train = config.train
    assert (train.learning_rate, train.weight_decay, train.warmup_steps, train.max_grad_norm) == (1e-6, 0.01, 0, 1.0)
    assert train.max_steps * config.algo.tasks_per_step == 300 * 512


def test_search_r1_is_one_episode_with_a_forced_answer_and_a_penalty_on_divergence():
    config = profile("search_r1_paper")
    assert (config.reflection.episodes, config.rollout.max_turns, config.rollout.force_final_answer) == (1, 4, True)
    assert (config.algo.advantage, config.rollout.num_generations) == ("group_norm", 5)
    assert (config.loss.kl_coef, config.loss.kl_estimator, config.loss.kl_in_reward) == (0.001, "k3", False)
    assert config.train.warmup_steps == pytest.approx(0.285 * config.train.max_steps, abs=1)
    assert config.train.max_steps * config.algo.tasks_per_step == 1005 * 512


@pytest.mark.parametrize("name", ["mr_search_paper", "search_r1_paper"])
def test_what_a_profile_of_the_paper_refers_to_is_there(name, monkeypatch):
    monkeypatch.chdir(ASSETS_DIR.parent)
    config = profile(name)
    servers = load_server_configs(config.tools)
    assert [server.name for server in servers] == ["wiki"]
    assert config.train.accelerate_config is not None
    assert config.train.accelerate_config.is_file()
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    assert longest <= config.inference.context_length <= config.train.max_tokens
