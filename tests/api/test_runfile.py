"""Every key or value that a method's settings had before is answered with what it is now."""

from __future__ import annotations

from typing import Any

import pytest

from ondevice.api.runfile import RunConfig
from ondevice.core.errors import ConfigError
from ondevice.core.registry import method_config, methods

NOW = [
    ("lora", "targets", ["q_proj"], "'method.targets' is now 'method.target_modules'"),
    ("lora-fa", "targets", ["q_proj"], "'method.targets' is now 'method.target_modules'"),
    ("lsp", "weights", "host", "'method.weights=host' is now 'method.weight_placement=host'"),
    ("lsp", "weights", "nf4", "'method.weights' is now 'method.weight_dtype'"),
    ("mesp", "targets", ["q_proj"], "'method.targets' is now 'method.target_modules'"),
    ("mesp", "weights", "streamed", "'method.weights' is now 'method.weight_placement'"),
    (
        "mesp",
        "gradients",
        "autodiff",
        "'method.gradients' is no longer a setting: mesp always computes its own",
    ),
    ("mesp", "store_h", True, "'method.store_h' is no longer a setting: x A^T is always computed"),
    ("prge", "targets", ["q_proj"], "'method.targets' is now 'method.target_modules'"),
    ("prge", "inner_loop", True, "'method.inner_loop' is now 'method.batch_signs'"),
    ("prge", "outer_loop", True, "'method.outer_loop' is now 'method.batch_queries'"),
    ("prge", "form", "copies", "'method.form' is no longer a setting: the state is one copy of B"),
    (
        "slideformer",
        "vocabulary_chunks",
        4,
        "'method.vocabulary_chunks' is now 'method.loss_tiles'",
    ),
]


@pytest.mark.parametrize(("name", "key", "value", "words"), NOW)
def test_an_old_key_says_what_it_is_now(name: str, key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(
            None, {"model.source": "tiny:llama", "method.name": name, f"method.{key}": value}
        )
    assert words in caught.value.message


def test_an_old_artifact_s_default_of_a_removed_setting_is_read() -> None:
    assert method_config("mesp", {"store_h": False}) == method_config("mesp")


def test_the_kind_of_program_is_no_longer_a_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(None, {"model.source": "tiny:llama", "export.program": "whole"})
    assert "'export.program' is no longer a setting" in caught.value.message


def test_the_table_has_all_of_them_and_every_new_one_is_a_setting() -> None:
    listed = {(name, key, value) for name, key, value, _ in NOW if isinstance(value, str)}
    for spec in methods():
        for old in (*spec.config.RENAMED, *spec.config.REMOVED):
            key, _, value = old.partition("=")
            keys = {entry[1] for entry in NOW if entry[0] == spec.name}
            assert key in keys and (not value or (spec.name, key, value) in listed), (
                spec.name,
                old,
            )
        for new in spec.config.RENAMED.values():
            key, _, value = new.partition("=")
            assert spec.config.parse({key: value} if value else {}), new
            assert key in spec.config.model_fields, (spec.name, new)


WRONG = [
    ("train.learning_rate", "it is a key of method: write 'method.learning_rate'"),
    ("learning_rate", "write 'method.learning_rate'"),
    ("method.steps", "it is a key of train: write 'train.steps'"),
    ("data.batch_size", "write 'train.batch_size'"),
    ("train.lr", "did you mean 'method.learning_rate'?"),
    ("train.stepz", "did you mean 'steps'?"),
    ("method.schedule", "write 'train.schedule'"),
    ("method.queries", "it is a key of mezo, prge"),
    ("trian.steps", "did you mean 'train'?"),
]


@pytest.mark.parametrize(("key", "words"), WRONG)
def test_a_key_in_the_wrong_section_says_its_dotted_name(key: str, words: str) -> None:
    settings = {"model.source": "tiny:llama", "method.name": "mesp", key: 1}
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(None, settings)
    assert caught.value.message.endswith(words)
