"""The run file of a fleet: an ordinary one, and a section each for the fleet and for its
simulation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ondevice.api.runfile import RunConfig, read_yaml
from ondevice.core.capabilities import Replays
from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError, OndeviceError
from ondevice.core.flags import Flag
from ondevice.core.registry import method_config, methods, spec_of
from ondevice.core.session import Replaying, require
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.averaging.rules import Averaging
from ondevice.fleet.charter import Charter, FleetConfig
from ondevice.fleet.combine import shared_group
from ondevice.fleet.keys import fingerprints
from ondevice.fleet.member import load_vector, vector_name
from ondevice.fleet.messages import UNIT, Outcome
from ondevice.objectives import OBJECTIVES
from ondevice.training.objective import objective_of

if TYPE_CHECKING:
    from ondevice.core.session import Session


Attack = Literal["flip", "random", "huge"]


class SimulationConfig(StrictConfig):
    """Devices of a simulated fleet, and what goes wrong with them."""

    devices: Annotated[int, Flag("--devices")] = Field(default=8, ge=1, le=100_000)
    """Simulated devices."""

    dirichlet: Annotated[float | None, Flag("--dirichlet")] = Field(default=None, gt=0)
    """Split the rows by label with this Dirichlet concentration, otherwise evenly. 0.1 gives most
    devices one label."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the devices that do not reply in a round, drawn for each round."""

    late: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the replies that come after their round has ended, and are refused."""

    hostile: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the devices that lie: the same ones in every round."""

    attack: Attack = "flip"
    """The replies of hostile devices: their numbers negated and ten times as large, noise, or
    numbers and rows as large as a message holds."""

    weak: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the devices of a first-order fleet that are too weak for a backward pass: they
    reply with a zeroth-order method's numbers, which the server makes an adapter of. For methods
    that freeze A."""

    weak_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the weak devices."""

    eval_every: int | None = Field(default=None, ge=1)
    """Rounds between two evaluations, for `curve` and plots; the first and the last round are
    always evaluated."""

    @model_validator(mode="after")
    def _somebody(self) -> SimulationConfig:
        if self.hostile and round(self.hostile * self.devices) == 0:
            raise ValueError(f"hostile: {self.hostile:g} of {self.devices} devices rounds to 0")
        return self


class FleetRun(RunConfig):
    """A fleet's run file: everything of `ondevice train`, `fleet` and `simulation`."""

    fleet: FleetConfig = Field(default_factory=FleetConfig)
    """Rounds and combination."""

    averaging: Averaging = Field(default_factory=Averaging)
    """Of first-order methods' fleets."""

    simulation: SimulationConfig = Field(default_factory=SimulationConfig)
    """Of `ondevice fleet simulate`."""

    @model_validator(mode="after")
    def _own_rows(self) -> FleetRun:
        names = ("packing", "group_by_length", "streaming")
        asked = [name for name in names if getattr(self.data, name)]
        if asked:
            raise ValueError(
                f"data.{asked[0]}: a fleet's devices take their own rows, in their own order"
            )
        if self.train.objective not in ("loss", *OBJECTIVES):
            raise ValueError(
                f"train.objective {self.train.objective}: a fleet's devices train on the loss of "
                "their rows, or on preferences"
            )
        return self

    @classmethod
    def load(cls, path: Path | None = None, overrides: dict[str, Any] | None = None) -> Self:
        """Read a run file with `overrides` on top; see `RunConfig.load`.

        Without a method it is the one whose replies are numbers. Without its noise it is signs:
        they replay several times faster than Gaussians."""
        values = {}
        if path is not None:
            values = read_yaml(path)
        section = values.get("method")
        named = section
        if not isinstance(section, str):
            named = (section or {}).get("name")
        given = dict(overrides or {})
        if given.get("train.out") is None and "out" not in (values.get("train") or {}):
            given["train.out"] = "runs/fleet"
        if not named and not given.get("method.name"):
            given["method.name"] = default_method()
        has_noise = isinstance(section, dict) and "noise" in section
        config = super().load(
            path, dict(sorted(given.items(), key=lambda item: item[0] != "method.name"))
        )
        if not has_noise and given.get("method.noise") is None and hasattr(config.method, "noise"):
            settings = config.method.model_dump(exclude_unset=True) | {"noise": "rademacher"}
            config = config.model_copy(
                update={"method": method_config(config.method.name, settings)}
            )
        config = config.decided()
        config.check_method()
        return config

    def decided(self) -> Self:
        """Return the run file with every `auto` of a method with given subspaces decided."""
        if not self.gives_subspaces:
            return self
        return self.model_copy(update={"method": spec_of(self.method).for_training(self.method)})

    @property
    def gives_subspaces(self) -> bool:
        """True if the subspace is a gradient's rather than the seed's: only on request, because a
        subspace is megabytes, and a device without PyTorch cannot compute one."""
        return getattr(self.method, "subspace", None) == "gradient"

    @property
    def averages(self) -> bool:
        """True if devices reply with adapters, which the server averages, rather than with
        numbers."""
        return spec_of(self.method).order == "first"

    def check_method(self) -> None:
        """Refuse a method that a fleet cannot share.

        Raises:
            ConfigError: the method trains the whole model; or a setting is of the other kind of
                fleet.
        """
        spec = spec_of(self.method)
        if spec.trains != "adapter" or not (self.averages or spec.capability(Replays)):
            capable = [
                other.name
                for other in methods()
                if other.trains == "adapter"
                and (other.capability(Replays) or other.order == "first")
            ]
            raise ConfigError(
                f"a fleet cannot share what method {spec.name} trains",
                expected=f"a method that trains an adapter: {', '.join(capable)}",
                received=spec.name,
            )
        if self.averages:
            allowed = {"local_steps", "rounds", "sample", "least_devices", "wait_s", "date"}
            odd = sorted(
                name
                for name, value in self.fleet
                if name not in allowed and value != _default(name)
            )
            if odd:
                raise ConfigError(
                    f"fleet.{odd[0]} is for devices that reply with numbers, but {spec.name} replies with adapters",
                    expected="averaging.strategy, such as fedtrimmedavg",
                    received=", ".join(odd),
                )
        elif self.simulation.weak:
            raise ConfigError(
                "simulation.weak is the fraction of zeroth-order devices in a first-order fleet",
                expected="a first-order method such as lora-fa",
                received=spec.name,
            )

    def check_device_keys(self, device_keys: Path | None) -> None:
        """Check that a charter names its devices' keys if and only if they are used.

        Raises:
            ConfigError: a secure fleet without keys, or a first-order one with them.
        """
        if self.fleet.secure and device_keys is None:
            raise ConfigError(
                "a secure fleet's charter names its devices, so that no server can stand in for one",
                expected="--device-keys DIR, the folder of their public keys",
                hint="`ondevice fleet certificates keys --devices 3` makes keys/devices",
            )
        if self.averages and device_keys is not None:
            raise ConfigError(
                f"{self.method.name} replies with adapters, which devices do not sign: --device-keys"
            )

    def adapter_charter(self, model: Any) -> AdapterCharter:
        """Return the charter of a first-order fleet of this run file.

        Args:
            model: names the base model, by `source` and `sha256`.
        """
        return AdapterCharter(
            model_source=str(model.source),
            model_sha256=model.sha256,
            method=self.method.model_dump(mode="json"),
            data=self.shared_data(),
            seed=self.train.seed,
            learning_rate=self.method.learning_rate,
            objective=self.shared_objective(),
            local_steps=self.fleet.local_steps,
            averaging=self.averaging,
        )

    def shared_data(self) -> dict[str, Any]:
        """Return the settings of the data that all devices share: how rows become tokens, and no
        path."""
        hidden = {"path", "eval_path", "validation_split", "columns"}
        values = self.data.model_dump(mode="json", exclude=hidden)
        if self.fleet.date is None:
            return values
        return values | {"date": self.fleet.date.isoformat()}

    def shared_objective(self) -> dict[str, Any] | None:
        """Return the objective over preferences that all devices share; None for the loss."""
        made = objective_of(self.train)
        if made is None:
            return None
        return {"name": made.name, **asdict(made)}

    def charter(self, session: Session, model: Any, device_keys: Path | None = None) -> Charter:
        """Return the charter of this run file's fleet.

        Args:
            session: an open one; the size of its vector is the fleet's.
            model: names the base model, by `source` and `sha256`.
            device_keys: folder of the devices' public keys.
        """
        vectors = [
            value.size
            for value in session.state().values()
            if value.dtype == np.float32 and value.ndim == 1
        ]
        if len(vectors) != 1:
            raise ConfigError(
                "the method's state is not one vector", received=f"{len(vectors)} float32 vectors"
            )
        optimizer = "adam" if getattr(self.method, "optimizer", None) == "adam" else "sgd"
        given = self.gives_subspaces
        if optimizer == "adam" and not given:
            raise ConfigError(
                "a fleet has Adam only with given subspaces: method.optimizer",
                expected="sgd, or method.subspace gradient",
                received="adam",
            )
        charter = Charter(
            model_source=str(model.source),
            model_sha256=model.sha256,
            method=self.method.model_dump(mode="json"),
            data=self.shared_data(),
            seed=self.train.seed,
            size=vectors[0] // (3 if optimizer == "adam" else 1),
            noise=self.method.noise,
            queries=self.method.queries,
            learning_rate=self.method.learning_rate,
            objective=self.shared_objective(),
            optimizer=optimizer,
            subspace="given" if given else "seed",
            refresh_steps=self.method.refresh_every if given else None,
            fleet=self.fleet.agreement(),
            device_keys=() if device_keys is None else fingerprints(device_keys),
        )
        check_update(session, charter)
        return charter


def _default(name: str) -> Any:
    return FleetConfig.model_fields[name].get_default(call_default_factory=True)


def check_update(session: Session, charter: Charter) -> None:
    """Refuse a method whose update differs from the fleet's own for the same numbers.

    The session is tried, whatever the method's settings say: the second step knows the first one's
    moments.

    Raises:
        ConfigError: the update is another.
    """
    name = vector_name(session, charter.session_size)
    before = session.state()
    if charter.subspace == "seed" and (more := sorted(set(before) - {name, "seed"})):
        raise ConfigError(
            "the method has more state than the vector that a fleet shares",
            expected="plain steps in a space that only the seed decides",
            received=", ".join(more),
            hint="leave out settings that fit a subspace to the rows, or name it: method.subspace gradient",
        )
    agreed = charter.fleet.model_copy(
        update={"server_rate": 1.0, "momentum": 0.0, "decay_rounds": None}
    )
    state = charter.model_copy(update={"fleet": agreed}).state()
    rate = charter.learning_rate
    start = before[name][: charter.size].astype(np.float64)
    try:
        load_vector(session, before[name], name)
        for step in range(2):  # the second knows the first one's moments, if any
            given = np.random.default_rng(step).normal(0.0, 1.0, charter.queries).tolist()
            require(session, Replaying).apply_update(tuple(given), step, rate)
            group = shared_group(step, given, rate / charter.queries)
            state.apply(Outcome(0, step, bytes(8), bytes(8), (group,)), check=False)
        moved = session.state()[name][: charter.size] - start
    except OndeviceError as error:
        raise ConfigError(
            "the method's update cannot be shared by a fleet", received=error.message
        ) from None
    session.load_state(before)
    expected = state.vector * 2.0**UNIT
    if not np.allclose(moved, expected, rtol=0, atol=1e-2 * float(np.abs(expected).max())):
        raise ConfigError(
            "the method's update differs from a fleet's update by the same numbers",
            expected="a sum of random directions times numbers, or Adam of it in a gradient's subspace",
            hint="leave out settings that add an optimizer's moments",
        )


def default_method() -> str:
    """Return the name of the first method that a fleet can run."""
    return next(
        spec.name for spec in methods() if spec.capability(Replays) and spec.trains == "adapter"
    )
