"""What other programs call our settings, and which settings of a training file are not for sampling."""
import pytest

from configurator import find_settings, override
from project import SCRIPT
from sampling.compatibility import ALIASES, training_settings

SETTINGS = find_settings(SCRIPT)


def test_aliases_name_settings_but_are_not_settings():
    assert not ALIASES.keys() & SETTINGS.keys()
    for meant in ALIASES.values():
        assert set(meant.split(" or ")) <= SETTINGS.keys()


@pytest.mark.parametrize("argument, setting", [
    ("-p", "start"), ("--prompt", "start"), ("--model", "out_dir or init_from"), ("-n", "num_samples or max_new_tokens"), ("--max_length", "max_new_tokens"),
    ("--max-length", "max_new_tokens"), ("--num_return_sequences", "num_samples"), ("--temp", "temperature"), ("--n_predict", "max_new_tokens"),
    ("--n-predict", "max_new_tokens"), ("-temp", "temperature"), ("-seed", "seed"), ("--ckpt", "out_dir"),
], ids=str)
@pytest.mark.parametrize("form", ["{}=5", "{} 5"])
def test_the_error_suggests_our_name_for_an_alias(argument, setting, form):
    with pytest.raises(ValueError) as error:
        override({"__file__": str(SCRIPT)}, form.format(argument).split(), aliases=ALIASES)
    assert str(error.value).startswith(f"unknown setting {argument}; did you mean {setting}?; ")


@pytest.mark.parametrize("names, ignored", [
    ({"learning_rate"}, {"batch_size"}), ({"gradient_accumulation_steps", "os"}, {"batch_size"}), ({"max_iters"}, {"batch_size"}),
    ({"eval_iters", "eval_only", "wandb_log"}, {"batch_size"}), (set(), set()), ({"os", "helper", "block_size"}, set()),
], ids=lambda names: ",".join(sorted(names))) # str(set) changes from run to run
def test_the_batch_size_of_a_training_file_is_ignored(names, ignored):
    assert training_settings(names).keys() == ignored <= SETTINGS.keys()
