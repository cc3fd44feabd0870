"""A device's end: its copy of the fleet, its rows and its session, in one process for many
messages.

The carrier of messages (Flower's process, or a file) asks it over a socket that only its user can
open."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import atomic_write
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import DataConfig
from ondevice.core.errors import OndeviceError
from ondevice.data import pad_id_of, read_dataset
from ondevice.data.encode import dated
from ondevice.fleet.asking import encoded, received
from ondevice.fleet.averaging.arrays import digest, from_bytes, to_bytes
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.averaging.member import AdapterMember
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.charter import Charter
from ondevice.fleet.codes import Code, Refusal, code_of, refusing
from ondevice.fleet.frozen import Frozen, Space, matched
from ondevice.fleet.keys import REPLY_DOMAIN, DeviceKey, Signed
from ondevice.fleet.ledger import Ledger, cost_of
from ondevice.fleet.local import own_batches
from ondevice.fleet.log import checked as of_fleet
from ondevice.fleet.member import Member
from ondevice.fleet.messages import Refresh, Task, read_event
from ondevice.fleet.open import check_method, open_for, public_source, task_of
from ondevice.fleet.replies import Request, checked, sent
from ondevice.fleet.secure import Secrets, vector_of
from ondevice.fleet.stages import read_request
from ondevice.fleet.standing import Standing
from ondevice.fleet.store import Store
from ondevice.training.objective import check_format, check_learns

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.data import Batches
    from ondevice.fleet.state import State
    from ondevice.training.preferences import PreferenceBatches

log = logging.getLogger("ondevice.fleet")
SETTINGS_FILE = "device.json"
TRAFFIC = "bytes.txt"
"""Bytes to and from this device, transport apart, so far."""
METRICS = "metrics"
"""Rows and loss, which the ledger stores with a first-order reply's tensors."""


@dataclass(frozen=True)
class DeviceSettings:
    """The settings of a device, which only its owner sets.

    Attributes:
        folder: of its own copy of the fleet.
        data: its rows; they stay here.
        task, columns, strict_columns: how they are read; the charter's task by default.
        model: the base model under this device's name for it; the charter's by default.
        artifact: an exported program instead of the model.
        batch_size: rows a step, unless the program decides it.
        gives_subspace: this device may be asked for the subspace of its rows' gradient.
        key: file of the device's private key, which signs what a server could say in its name.
        epsilon: privacy budget of all replies from this folder; see `ledger.Ledger.check_budget`.
    """

    folder: str
    data: str
    task: str | None = None
    columns: dict[str, str] | None = None
    strict_columns: bool = False
    model: str | None = None
    artifact: str | None = None
    batch_size: int = 4
    gives_subspace: bool = False
    key: str | None = None
    epsilon: float | None = None


class Device:
    """A device's end: its store, and a member over its session, opened at the first task.

    Args:
        standing: learns which rounds fail here, and whether the fleet is over.
    """

    def __init__(self, settings: DeviceSettings, standing: Standing | None = None) -> None:
        self.settings = settings
        self.standing = standing
        self._member: Member | None = None
        self._averaging: AdapterMember | None = None
        self._secrets: tuple[bytes, Secrets] | None = None

    def reply(self, content: dict[str, Any], number: int) -> dict[str, Any]:
        """Reply to one message; to an error with its code only: the message stays on this device.

        Args:
            number: the device's, as the transport has it.
        """
        try:
            reply = sent(self.take(content, number))
        except OndeviceError as error:
            log.warning("%s", error)
            self._note(content, error.message)
            return failed(error)
        except Exception as error:
            log.exception("a message could not be processed")
            self._note(content, repr(error))
            return failed(error)
        self._note(content, None)
        return reply

    def _note(self, content: dict[str, Any], failure: str | None) -> None:
        """Note whether a round got its reply, and whether the fleet is over."""
        if self.standing is None:
            return
        number = round_of(content)
        if number is not None and failure is not None:
            self.standing.failed_in(number, failure)
        elif number is not None:
            self.standing.replied(number)
        elif failure is None and content.get("over") is True:
            self.standing.is_over = True

    def take(self, content: dict[str, Any], number: int) -> dict[str, Any]:
        """Take one message: the charter, or events and maybe a task; see `reply`. Counts the bytes
        of both.

        Raises:
            OndeviceError: the message cannot be taken.
        """
        answer = self._take(content, number)
        file = Path(self.settings.folder) / TRAFFIC
        atomic_write(file, str(traffic_of(file.parent) + _size(content) + _size(answer)))
        return answer

    def _take(self, content: dict[str, Any], number: int) -> dict[str, Any]:
        folder = Path(self.settings.folder)
        checked(Request, content)
        if "adapter" in content:
            return self._average(folder, content)
        if "charter" in content:
            with refusing(Code.MALFORMED):
                charter = Charter.from_bytes(content["charter"])
            with refusing(Code.OTHER_FLEET), Store.create(folder, charter) as store:
                if "events" not in content:
                    more = {}
                    if self.settings.gives_subspace:
                        more = {"gives_subspace": True}
                    return {"place": store.count(), **more}
        with refusing(Code.NO_FLEET):
            store = Store.open(folder)
        with store:
            state = self._follow(store, content)
            if not {"task", "subspace"} & content.keys():
                return {"digest": state.digest(), "place": store.count()}
            if "subspace" in content:
                if not self.settings.gives_subspace:
                    raise Refusal(
                        Code.SUBSPACE,
                        "this device does not compute subspaces",
                        hint="its owner says --gives-subspace",
                    )
                file = self._entered(store, state, number).subspace()
                return {"frozen": file.to_bytes(), "place": store.count()}
            with refusing(Code.MALFORMED):
                task = Task.from_bytes(content["task"])
            store.charter.check_task(task)
            with Ledger(folder) as ledger:
                once = partial(ledger.once, task.fleet, task.round, task.begin)
                cost = cost_of(store.charter.fleet.noise_multiplier)
                budget = self.settings.epsilon
                if store.charter.fleet.secure:
                    return self._secure(
                        store, state, content, number, partial(once, budget=budget), cost
                    )

                def answer() -> bytes:
                    return self._entered(store, state, number).answer(task).to_bytes()

                request = content["task"] + number.to_bytes(8, "little")
                return {"answer": once("answer", request, answer, cost=cost, budget=budget)}

    def _follow(self, store: Store, content: dict[str, Any]) -> State:
        """Apply the events of a message that this device lacks."""
        state = self._state(store)
        given = content.get("events", [])
        known = set(store.events()) if given else set()
        # A file may be taken twice, and a server may not know what a device has.
        with refusing(Code.MALFORMED):
            events = [read_event(data) for data in given if data not in known]
            files = matched(events, [Frozen.from_bytes(data) for data in content.get("frozen", [])])
        with refusing(Code.OTHER_STATE):
            for event in events:
                state.apply(of_fleet(event, store.charter))
                store.add(
                    event, state, frozen=files[event.digest] if isinstance(event, Refresh) else None
                )
        return state

    def _entered(self, store: Store, state: State, number: int) -> Member:
        """The member in the fleet's state, and in its subspace."""
        member = self._open(store.charter, number)
        member.state = state
        member.device = number
        if member.space is not None:
            member.space.enter(
                [read_event(data) for data in store.events(member.space.place)], store.file_of
            )
        return member

    def _state(self, store: Store) -> State:
        """This device's state: the member's, or else the stored one."""
        last = store.connection.execute(
            "SELECT event FROM events ORDER BY place DESC LIMIT 1"
        ).fetchone()
        if (
            self._member is not None
            and last is not None
            and self._member.state.hash == read_event(last[0]).after
        ):
            return self._member.state
        return store.state()

    def _secure(
        self,
        store: Store,
        state: State,
        content: dict[str, Any],
        number: int,
        once: Callable[..., bytes],
        cost: float,
    ) -> dict[str, Any]:
        """Reply to a stage of a secure sum; nothing else leaves a device of such a fleet.

        Args:
            once: the ledger's, for the task's round.

        Raises:
            Refusal: the message is of no stage, or the round has another sum.
        """
        if "secure" not in content:
            raise Refusal(
                Code.UNSAFE,
                "a secure fleet's devices reply only with masked sums",
                hint="run the server over Flower",
            )
        task = Task.from_bytes(content["task"])
        data = content["secure"]
        stage = read_request(data).stage

        def vector() -> np.ndarray:
            return vector_of(
                self._entered(store, state, number).answer(task), store.charter.fleet.most_rows
            )

        def answer() -> bytes:
            if stage == "keys":
                allowed = frozenset(store.charter.device_keys)
                self._secrets = (
                    content["task"],
                    Secrets(number, self._key(), content["task"], allowed),
                )
            known, secrets = self._secrets or (b"", None)
            if secrets is None or known != content["task"]:
                raise Refusal(Code.UNSAFE, "this device has begun no secure sum of this task")
            return secrets.reply(data, vector)

        request = content["task"] + number.to_bytes(8, "little") + data
        return {"secure": once(stage, request, answer, cost=cost if stage == "mask" else 0.0)}

    def _key(self) -> DeviceKey:
        """This device's key.

        Raises:
            Refusal: its owner names none.
        """
        if self.settings.key is None:
            raise Refusal(
                Code.KEYS,
                "a device of a secure fleet signs its keys",
                hint="--key FILE, its private key",
            )
        return DeviceKey(Path(self.settings.key))

    def signed(self, answer: bytes) -> Signed | None:
        """Return the signature of a reply that travels as a file; None if the charter names no
        devices.

        Raises:
            Refusal: this device has no key.
        """
        with Store.open(Path(self.settings.folder)) as store:
            if store.charter.device_keys:
                return self._key().sign(REPLY_DOMAIN + answer)
            return None

    def _average(self, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
        """Take an adapter of a first-order fleet: train from it, or keep it as the last one and say
        its hash."""
        number = content.get("round", 0)
        with refusing(Code.MALFORMED):
            charter = AdapterCharter.from_bytes(content["charter"])
            arrays = from_bytes(content["adapter"])
        with refusing(Code.OTHER_FLEET), AdapterStore.create(folder, charter, arrays) as store:
            store.keep(arrays)
            if content.get("last"):
                return {"digest": digest(store.tensors())}

        def answer() -> bytes:
            if self._averaging is None or self._averaging.charter != charter:
                self._averaging = open_adapter_member(charter, self.settings)
            done = self._averaging.answer(number, arrays)
            return to_bytes({**done.arrays, METRICS: np.array([done.rows, done.loss])})

        with Ledger(folder) as ledger:
            data = ledger.once(
                charter.id, number, bytes.fromhex(digest(arrays)), "adapter", b"", answer, cost_of(0.0),
                self.settings.epsilon, keep=1,
            )  # fmt: skip
        given = from_bytes(data)
        rows, loss = given.pop(METRICS).tolist()
        return {"adapter": to_bytes(given), "rows": int(rows), "loss": loss}

    def _open(self, charter: Charter, number: int) -> Member:
        if self._member is None or self._member.charter != charter:
            self._member = open_member(charter, self.settings, number)
            if charter.subspace == "given":
                folder = Path(self.settings.folder) / "subspaces"
                self._member.space = Space(charter, self._member.session, self._member.name, folder)
        return self._member


def round_of(content: dict[str, Any]) -> int | None:
    """Return the round that a message asks for numbers or an adapter of; None if it asks for
    neither."""
    try:
        if "task" in content:
            return Task.from_bytes(content["task"]).round
        if "adapter" in content and not content.get("last"):
            return int(content["round"])
    except (OndeviceError, KeyError, TypeError, ValueError):
        return None  # the message was refused
    return None


def failed(error: Exception) -> dict[str, Any]:
    """Return the reply for an error: its code, and the number of the device that it is about, if
    any."""
    about = getattr(error, "about", None)
    return {"error": str(code_of(error)), **({} if about is None else {"about": about})}


def traffic_of(folder: Path) -> int:
    """Return the bytes of all messages to and from a device, transport apart."""
    try:
        return int((folder / TRAFFIC).read_text())
    except (OSError, ValueError):
        return 0


def _size(content: dict[str, Any]) -> int:
    """Bytes of a message's own fields."""
    found = [
        item
        for value in content.values()
        for item in (value if isinstance(value, list) else [value])
    ]
    return sum(len(value) for value in found if isinstance(value, bytes))


def open_member(charter: Charter, settings: DeviceSettings, number: int) -> Member:
    """Open a device's session and rows for a fleet.

    Raises:
        DataError: no row can be used.
        ArtifactError: the model or the program is not the fleet's.
    """
    session, batches = _open(charter, settings)
    return Member(charter, session, batches, number)


def open_adapter_member(charter: AdapterCharter, settings: DeviceSettings) -> AdapterMember:
    """Open a device's session and rows for a first-order fleet; raises as `open_member`."""
    session, batches = _open(charter, settings)
    return AdapterMember(charter, session, batches)


def _open(
    charter: Charter | AdapterCharter, settings: DeviceSettings
) -> tuple[Session, Batches | PreferenceBatches]:
    artifact = None
    if settings.artifact is not None:
        artifact = Path(settings.artifact)
    check_method(charter)
    model = settings.model if settings.model or artifact else public_source(charter)
    task = task_of(charter, settings.task)
    made = charter.learns()
    if artifact is not None and made is not None:
        check_learns(made, None, read_manifest(artifact), DataConfig())
    session, tokenizer = open_for(charter, model, artifact)
    length = charter.data.get("max_length_tokens") or 256
    if session.lengths_tokens is not None:
        length = min(length, max(session.lengths_tokens))
    rows = read_dataset(
        Path(settings.data),
        dated(tokenizer, charter.date),
        task=task,
        max_length_tokens=length,
        train_on_prompt=bool(charter.data.get("train_on_prompt")),
        columns=settings.columns,
        strict_columns=settings.strict_columns,
        preferences=made is not None,
    )
    if made is not None:
        check_format(made, rows.format)
    size = settings.batch_size
    if isinstance(charter, Charter):
        size = charter.fleet.batch_rows(len(rows), size)
    batches = own_batches(
        made,
        session,
        rows,
        size,
        charter.seed,
        pad_id_of(tokenizer),
        folder=Path(settings.folder),
        identity={"model": charter.model_sha256, "fleet": f"{charter.id:08x}"},
    )
    return session, batches


@contextmanager
def answering(settings: DeviceSettings, standing: Standing | None = None) -> Iterator[Path]:
    """Reply over a socket in a thread of this process; yield the file that names the socket.

    The socket is in a folder of its own below the system's temporary one, which only this user can
    enter: a path of the user's may be longer than a socket's name can be."""
    device = Device(settings, standing)
    with tempfile.TemporaryDirectory(prefix="ondevice-") as folder:
        address = str(Path(folder) / "device")
        file = Path(settings.folder).absolute() / SETTINGS_FILE
        atomic_write(file, json.dumps({"socket": address, **asdict(settings)}, ensure_ascii=False))
        with Listener(address, family="AF_UNIX") as listener:
            thread = threading.Thread(
                target=_listen, args=(listener, device), name="ondevice-device", daemon=True
            )
            thread.start()
            yield file
            file.unlink(missing_ok=True)


def _listen(listener: Listener, device: Device) -> None:
    while True:
        try:
            connection = listener.accept()
        except OSError:
            return  # the listener was closed
        try:
            with connection:
                number, content = received(connection)
                connection.send_bytes(encoded(number, device.reply(content, number)))
        except (EOFError, OSError):
            continue  # the process that asked has ended, perhaps while this one computed
        except Exception:
            log.exception("a message could not be processed")
