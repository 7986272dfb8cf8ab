import pytest

from agentrl.config.compatibility import UNAVAILABLE, known_names
from agentrl.config.load import load_config
from agentrl.config.settings import settings_index
from agentrl.errors import ConfigError


def load(*flags: str, environ: dict[str, str] | None = None):
    return load_config(profile=None, config_file=None, environ=environ or {}, argv_flags=flags)


def test_the_minirl_flags_select_loss_and_aggregation():
    flags = "--loss_calculater MINIRL --token_level_loss false --strict_in_bound true --skip_length_normalization true"
    loss = load(*flags.split()).loss
    assert (loss.loss, loss.aggregation, loss.strict_in_bound) == ("MINIRL", "seq_mean_token_sum", True)
    assert loss.importance_weight_cap_ratio is None


def test_token_level_loss_selects_the_aggregation():
    assert load("--token_level_loss").loss.aggregation == "token_mean"
    assert load("--token_level_loss", "false").loss.aggregation == "seq_mean_token_mean"


def test_loss_flags_restate_shared_settings_without_a_conflict():
    loss = load("--loss_calculater", "MINIRL", "--epsilon", "0.1", "--importance_weight_cap_ratio", "2").loss
    assert loss.epsilon == pytest.approx(0.2)  # without strict_in_bound the wide range is the clip range


def test_two_names_for_one_setting_that_disagree_are_refused():
    with pytest.raises(
        ConfigError, match=r'--loss_calculater = "GRPO" means loss = GRPO, but --loss = "CISPO" is given'
    ):
        load("--loss_calculater", "GRPO", "--loss", "CISPO")


def test_a_stronger_source_wins_over_a_translated_flag():
    assert load("--loss", "CISPO", environ={"AGENTRL_LOSS_CALCULATER": "GSPO"}).loss.loss == "CISPO"
    assert load("--loss_calculater", "GSPO", environ={"AGENTRL_LOSS": "CISPO"}).loss.loss == "GSPO"


def test_batch_flags_become_whole_groups():
    flags = "--per_device_train_batch_size 1 --gradient_accumulation_steps 48 --num_processes 2 --num_generations 8"
    assert load(*flags.split()).algo.tasks_per_step == 12


def test_batch_flags_become_rows_in_supervised_training():
    flags = "--loss_calculater CrossEntropy --per_device_train_batch_size 4 --gradient_accumulation_steps 8"
    assert load(*flags.split()).train.sft_batch_size == 32


def test_a_batch_that_splits_groups_is_refused_with_the_arithmetic():
    with pytest.raises(
        ConfigError, match=r"1 x 3 x 1 data parallel ranks = 3 rows per step is no multiple of num_generations = 8"
    ):
        load("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "3")


@pytest.mark.parametrize("value", ["0", "1.5", "x", "-1"])
def test_batch_flags_must_be_whole_numbers(value):
    with pytest.raises(ConfigError, match="needs a whole number from 1"):
        load("--gradient_accumulation_steps", value)


def test_torch_dtype_and_optim_args_are_translated():
    config = load("--torch_dtype", "bfloat16", "--optim_args", "betas=(0.8, 0.95)")
    assert config.model.bf16
    assert (config.train.adam_beta1, config.train.adam_beta2) == (0.8, 0.95)
    with pytest.raises(ConfigError, match="only betas"):
        load("--optim_args", "eps=1e-9")
    with pytest.raises(ConfigError, match="use bfloat16 or float32"):
        load("--torch_dtype", "float16")


@pytest.mark.parametrize("name", sorted(UNAVAILABLE))
def test_an_unavailable_feature_accepts_only_its_neutral_values(name):
    for value in UNAVAILABLE[name].neutral:
        load(f"--{name}={value}")
    with pytest.raises(ConfigError, match=rf'--{name} = "17": not available here: .*; remove it'):
        load(f"--{name}=17")


def test_no_name_is_both_a_setting_and_refused():
    assert not set(settings_index()) & set(UNAVAILABLE)
    assert set(settings_index()) < known_names()
