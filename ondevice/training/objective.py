"""The objective of a run: likelihoods of texts, preferences, or a score without a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.capabilities import LearnsPreferences, Writes
from ondevice.core.errors import ConfigError, Need
from ondevice.core.manifest import Manifest
from ondevice.core.registry import method_config, methods, spec_of, target
from ondevice.objectives import OBJECTIVES, Objective, objective
from ondevice.training.policy import check_policy, grpo_of
from ondevice.training.preferences import check_rated
from ondevice.training.scores import unscored

if TYPE_CHECKING:
    from ondevice.core.config import DataConfig, ExportConfig, TrainConfig
    from ondevice.core.method import Placement
    from ondevice.data.rows import Format
    from ondevice.training.rows import OpenedRows, RunRows

SCORES = ("accuracy", "f1", "command")
"""Values of `train.objective` that are scores without a gradient."""
DEFAULTS: dict[Format, str] = {"preference": "dpo", "thumbs": "kto"}
"""Objective of a run that names none, by the format of its rows."""
_SETTINGS = ("beta", "label_smoothing", "desirable_weight", "undesirable_weight", "margin")


def with_objective(
    train: TrainConfig, method: Any, runs_on: Placement | Manifest, opened: OpenedRows
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Return the loop's settings with the objective that the rows need, and a sentence about it.

    Args:
        runs_on: this machine, or an exported program.

    Raises:
        ConfigError: the method cannot learn from preferences or rewards there, or rows and
            objective do not fit together.
    """
    chosen = train.objective
    kind = opened.format
    if chosen == "grpo":
        return train, (_grpo(train, method, kind, runs_on, opened.data),)
    if chosen not in OBJECTIVES:
        if kind not in DEFAULTS:
            return train, ()
        if chosen != "loss":
            raise ConfigError(
                f"train.objective {chosen} is a score of answers, and the rows are preferences",
                expected=", ".join(OBJECTIVES),
                received=chosen,
            )
    name = chosen if chosen in OBJECTIVES else DEFAULTS[kind]
    settings = {key: getattr(train, key) for key in _SETTINGS}
    made = objective(name, **settings)
    check_format(made, kind)
    check_learns(made, method, runs_on, opened.data)
    train = train.model_copy(update={"objective": name})
    sentence = f"objective: {name}, beta {made.beta:g}"
    if name != chosen:
        rows_are = "preference pairs" if kind == "preference" else "rated answers"
        sentence += f", as the rows are {rows_are}"
    return train, (sentence,)


def check_learns(
    made: Objective, method: Any, runs_on: Placement | Manifest, data: DataConfig
) -> None:
    """Refuse a method, a program or settings of rows that do not go with an objective over
    preferences.

    Raises:
        ConfigError: they do not.
    """
    if isinstance(runs_on, Manifest):
        method = method_config(runs_on.method["name"], runs_on.method)
        _check_program(method, runs_on.target, runs_on.batch_size, made)
    else:
        _check_method(method, runs_on)
    _check_likelihoods(method, data, "preferences")


def check_format(made: Objective, kind: Format) -> None:
    """Refuse rows of another format than an objective takes.

    Raises:
        ConfigError: they are.
    """
    formats = {"pairs": "preference", "thumbs": "thumbs"}
    if kind != formats[made.rows]:
        words = {
            "pairs": "preference pairs: columns chosen and rejected",
            "thumbs": "rated answers: columns prompt, completion and label",
        }
        raise ConfigError(
            f"train.objective {made.name} does not fit the rows",
            expected=words[made.rows],
            received=f"format {kind}",
            hint="`ondevice data FILE` shows how the rows are read",
        )


def _check_method(method: Any, placement: Placement) -> None:
    spec = spec_of(method)
    learns = spec.capability(LearnsPreferences)
    if learns is None or placement.backend not in learns.backends:
        raise ConfigError(
            f"method {spec.name} does not learn from preferences in {placement.backend}",
            expected="a method that does",
            received=f"method {spec.name}, backend {placement.backend}",
            needs=Need.PREFERENCES,
        )


def check_exported(train: TrainConfig, method: Any, export: ExportConfig) -> None:
    """Refuse to export a program that could not learn from the preferences or the rewards that the
    run file names.

    Raises:
        ConfigError: as `with_objective` for the program.
    """
    if train.objective == "grpo":
        writes = export.shared_context is not None
        _check_answering(method, export.target, export.batch_size, train.group_size, writes)
    made = objective_of(train)
    if made is not None:
        _check_program(method, export.target, export.batch_size, made)


def _check_program(method: Any, target_name: str, rows: int, made: Objective) -> None:
    """Refuse a program of `rows` rows in a step that does not learn from preferences."""
    spec = spec_of(method)
    learns = spec.capability(LearnsPreferences)
    if learns is None or target(target_name).kind not in learns.programs:
        raise ConfigError(
            f"a program of {spec.name} for {target_name} does not learn from preferences",
            expected="a program of mesp",
            received=f"method {spec.name}, target {target_name}",
            hint="`ondevice export --method mesp` writes one",
        )
    if rows % made.texts:
        raise ConfigError(
            "the program takes an odd number of rows, and the texts of a pair stay together",
            expected="an even number of rows in a step",
            received=f"{rows}",
            hint="export it with --batch-size 2",
        )


def _check_likelihoods(method: Any, data: DataConfig, what: str) -> None:
    """Refuse settings that do not go with weighted likelihoods of whole rows."""
    if getattr(method, "loss", None) == "answers":
        raise ConfigError(
            f"a loss over the answers does not go with {what}",
            expected="method.loss: vocabulary, or left out",
            received="method.loss: answers",
        )
    for name in ("packing", "group_by_length", "streaming", "train_on_prompt"):
        if getattr(data, name):
            raise ConfigError(
                f"data.{name} does not go with {what}",
                expected=f"data.{name}: false",
                received=f"data.{name}: true",
                hint=f"leave it out, or set data.{name}: false",
            )


def _grpo(
    train: TrainConfig, method: Any, kind: Format, runs_on: Placement | Manifest, data: DataConfig
) -> str:
    """Return a sentence about a run on rewards.

    Raises:
        ConfigError: the rows have no prompts, or the method cannot do it in this backend.
    """
    if kind in ("text", "preference", "thumbs", "regression"):
        raise ConfigError(
            "train.objective grpo does not fit the rows",
            expected="rows with a prompt, such as prompt and completion, or messages",
            received=f"format {kind}",
            hint="`ondevice data FILE` shows how the rows are read",
        )
    if isinstance(runs_on, Manifest):
        method = method_config(runs_on.method["name"], runs_on.method)
        writes = runs_on.written_tokens > 0
        _check_answering(method, runs_on.target, runs_on.batch_size, train.group_size, writes)
    else:
        _check_writing(method, runs_on.backend)
    spec = spec_of(method)
    made = grpo_of(train)
    if spec.trains == "all" and made.beta:
        raise ConfigError(
            "the KL term compares with the model before training, which this method overwrites",
            expected="a method that trains an adapter, or --set train.beta=0",
            received=f"method {spec.name}, beta {made.beta:g}",
        )
    _check_likelihoods(method, data, "rewards")
    reward = train.reward or train.objective_command
    return (
        f"objective: grpo, {train.group_size} answers a prompt, beta {made.beta:g}, reward {reward}"
    )


def _check_writing(method: Any, backend: str) -> None:
    """Refuse a method that does not learn from rewards in this backend."""
    spec = spec_of(method)
    writes = spec.capability(Writes)
    reads_files = backend == "torch" and spec.reads_files(method, backend)
    if writes is None or backend not in writes.backends or reads_files:
        received = f"method {spec.name}, backend {backend}"
        raise ConfigError(
            f"method {spec.name} does not learn from rewards here",
            expected="a first-order method in torch whose weights are in memory, or mesp in MLX",
            received=f"{received}, weights in files" if reads_files else received,
            needs=Need.REWARDS,
        )


def _check_answering(
    method: Any, target_name: str, rows: int, group_size: int, writes: bool
) -> None:
    """Refuse a program that cannot answer, or that takes other numbers of rows than a group's.

    Args:
        rows: of a step.
        writes: the program has functions that write.
    """
    spec = spec_of(method)
    found = spec.capability(Writes)
    kind = target(target_name).kind
    if found is None or kind not in found.programs:
        raise ConfigError(
            f"a program of {spec.name} for {target_name} does not learn from rewards",
            expected="a program of mesp, or of a first-order method in PyTorch",
            received=f"method {spec.name}, target {target_name}",
            hint="`ondevice export --method mesp --target android-cpu "
            f"--batch-size {group_size} --set export.context_tokens=512` writes one",
        )
    again = f"export it with --batch-size {-(-rows // group_size) * group_size}"
    if kind not in ("torch", "mlx") and not writes:
        raise ConfigError(
            "the program has no functions that write answers to learn from",
            expected="one that is exported with --set export.context_tokens=512",
            received=f"a program for {target_name} without them",
            hint=f"{again} --set export.context_tokens=512",
        )
    if rows % group_size:
        if rows > 1:
            again += f", or give a --group-size that divides {rows}"
        raise ConfigError(
            "the rows of the program's step do not divide into whole groups of answers",
            expected=f"a multiple of --group-size {group_size}",
            received=f"{rows} rows in a step",
            hint=again,
        )


def texts_of_row(settings: TrainConfig) -> int:
    """Return how many texts of a row a step trains on."""
    made = objective_of(settings)
    if made is not None:
        return made.texts
    return settings.group_size if settings.objective == "grpo" else 1


def objective_of(settings: TrainConfig) -> Objective | None:
    """Return the objective over preferences that a run's settings name, or None."""
    if settings.objective not in OBJECTIVES:
        return None
    return objective(settings.objective, **{key: getattr(settings, key) for key in _SETTINGS})


def check_pictures(objective: str, placement: Placement, tokenizer: Any) -> None:
    """Refuse rows with images where the tower that reads them would change, or not be there.

    Raises:
        ConfigError: the method trains all parameters, the run is not in PyTorch, or it learns from
            generated answers.
    """
    pictures = getattr(tokenizer, "pictures", None)
    if pictures is None or not pictures.any:
        return
    able = [spec.name for spec in methods() if spec.trains == "adapter"]
    if placement.spec.trains == "all":
        raise ConfigError(
            f"{placement.spec.name} would train the tower that reads the images",
            expected=", ".join(able),
            received=f"--method {placement.spec.name}, rows with images",
            hint="an adapter's method keeps the tower as it is",
        )
    if placement.backend != "torch" or objective != "loss":
        raise ConfigError(
            "rows with images train in PyTorch, on the loss",
            expected="--backend torch, --objective loss",
            received=f"{placement.backend}, {objective}",
        )


def check_rows(settings: TrainConfig, rows: RunRows, most_tokens: int = 0) -> None:
    """Refuse rows that the objective cannot use.

    Args:
        most_tokens: positions of the model; 0 for no limit.

    Raises:
        ConfigError: no row has the score, or the reward cannot be found.
        DataError: a row lacks what a reward needs, or all answers have the same rating.
    """
    objective = settings.objective
    items = rows.train.items
    if objective == "grpo":
        check_policy(settings, rows, most_tokens)
    if objective == "accuracy" and not any(item.candidates for item in items):
        raise unscored(objective, rows.train)
    if objective == "f1" and not any(item.answers for item in items):
        raise unscored(objective, rows.train)
    if rows.train.format == "thumbs":
        check_rated(rows.train)
