"""An old key or value of a run file is an error that says what became of it."""

from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

from ondevice.core import config_errors
from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError


class First(StrictConfig):
    RENAMED: ClassVar[dict[str, str]] = {"targets": "target_modules", "loss=op": "loss=fused"}
    REMOVED: ClassVar[dict[str, str]] = {"form": "there is one form of the state"}

    name: Literal["first"] = "first"
    target_modules: tuple[str, ...] = ()
    loss: Literal["fused", "tiled"] = "tiled"


class Second(StrictConfig):
    name: Literal["second"] = "second"
    rank: int = 1


class Train(StrictConfig):
    RENAMED: ClassVar[dict[str, str]] = {"eps": "method.epsilon"}

    steps: int = 1


class Run(StrictConfig):
    method: Annotated[First | Second, Field(discriminator="name")] = First()
    train: Train = Train()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"method": {"name": "first", "targets": ["q"]}},
            "'method.targets' is now 'method.target_modules'",
        ),
        (
            {"method": {"name": "first", "loss": "op"}},
            "'method.loss=op' is now 'method.loss=fused'",
        ),
        (
            {"method": {"name": "first", "form": 1}},
            "'method.form' is no longer a setting: there is one form",
        ),
        ({"train": {"eps": 1e-3}}, "'train.eps' is now 'method.epsilon'"),
        ({"method": {"name": "second", "targets": ["q"]}}, "unknown key 'method.targets'"),
        ({"method": {"name": "first", "loss": "ops"}}, "'method.loss' has a wrong value"),
        ({"train": {"stepz": 3}}, "did you mean 'steps'"),
        ({"targets": 1}, "unknown key 'targets'"),
    ],
)
def test_an_old_key_is_answered_with_the_new_one(values, words) -> None:
    with pytest.raises(ConfigError) as caught:
        Run.parse(values, "run.yaml")
    assert words in caught.value.message and caught.value.message.startswith("run.yaml: ")


def test_a_section_that_is_parsed_alone_names_its_keys_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        First.parse({"targets": ["q"]}, "manifest")
    assert caught.value.message.startswith("manifest: 'targets'")
    assert "'target_modules'" in caught.value.message


class Described(StrictConfig):
    """A base's description is not said of what is declared anew."""

    kept: int = 1
    """Kept by
    both."""
    anew: int = 1
    """The base's."""
    own: int = Field(default=1, description="said by hand")
    """Below it."""


class More(Described):
    anew: int = 2
    more: Second = Second()
    """A section."""


def test_docstrings_below_the_fields_describe_them() -> None:
    told = {"kept": "Kept by\nboth.", "own": "said by hand", "more": "A section."}
    assert More.descriptions() == told
    properties = More.model_json_schema()["properties"]
    assert {
        name: part["description"] for name, part in properties.items() if "description" in part
    } == told
    assert Described.model_json_schema()["properties"]["anew"]["description"] == "The base's."


def test_of_thousands_of_unknown_keys_a_near_name_is_looked_for_to_those_that_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look takes a hundredth of a second: a run file of 60 kB took a minute."""
    looked: list[str] = []
    nearest = config_errors.nearest
    monkeypatch.setattr(
        config_errors, "nearest", lambda key, known: looked.append(key) or nearest(key, known)
    )
    with pytest.raises(ConfigError) as caught:
        Train.parse({f"key{n}": n for n in range(900)}, "run.yaml")
    assert looked == [f"key{n}" for n in range(config_errors.MOST_PROBLEMS)]
    assert "and 880 more" in str(caught.value)
