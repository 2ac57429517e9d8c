"""A model without code, from a TOML file: its shape and how it is trained.

::

    [model]
    layers = 12
    hidden = 768
    heads = 12
    vocab = 50257
    sequence = 1024

    [train]
    global_batch = 64
    precision = "bf16-mixed"
    optimizer = "adam"
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.core.errors import InputError, unknown
from paceline.plan.cluster import Device
from paceline.plan.clusters import devices
from paceline.plan.shapes.described import DescribedWorkload
from paceline.plan.shapes.shape import Shape

PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp8-mixed", "fp4-mixed")
OPTIMIZERS = ("sgd", "momentum", "adam")


@dataclass(frozen=True, slots=True)
class Job:
    """What the file says.

    >>> text = "[model]\\nlayers = 2\\nhidden = 8\\nheads = 2\\n[train]\\nglobal_batch = 4"
    >>> Job.from_toml(text).shape.parameters
    412008
    """

    shape: Shape
    global_batch: int
    precision: str = "bf16-mixed"
    optimizer: str = "adam"

    @classmethod
    def from_toml(cls, text: str, name: str = "") -> "Job":
        """From its text.

        Raises:
            InputError: no TOML, a key that is not known or missing, a value of another kind or out of its range.
        """
        told = toml(text)
        _known("section", told, ("model", "train"))
        model, train = section(told, "model"), section(told, "train")
        shape = Shape(**{"name": name} | checked(Shape, model, "model"))
        train = checked(cls, {"shape": {}} | train, "train")
        return cls(**train | {"shape": shape})

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError(f"global_batch = {self.global_batch}: a step has at least one sample; write 1 or more.")
        for kind, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise unknown(kind, value, known)

    def workload(self, device: Device) -> DescribedWorkload:
        """On a device; one that has a name is taken at this precision."""
        if device.name in devices.SHEETS:
            device = devices.device(device.name, self.precision)
        return DescribedWorkload(self.shape, device, self.global_batch, self.precision, self.optimizer)


def read(path: Path) -> Job:
    """From a file.

    Raises:
        InputError: it can't be read, or see :meth:`Job.from_toml`.
    """
    return Job.from_toml(text_of(path), path.stem)


def text_of(path: Path) -> str:
    """What is in a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read ({error}); write the path of a TOML file.") from None


def toml(text: str) -> Mapping[str, Any]:
    """What it says."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"this is no TOML: {error}; write lines such as layers = 12 under [model].") from None


def section(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One of it."""
    found = told.get(name)
    if not isinstance(found, dict):
        raise InputError(f"there is no section [{name}]; write [{name}] and its lines under it.")
    return found


def checked(kind: type, told: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A section's lines as what a dataclass is made from: each known and of its kind, none missing."""
    known = {each.name: each for each in fields(kind)}
    _known(f"key of {section_of(where)}", told, known)
    for name, each in known.items():
        if each.default is MISSING and each.default_factory is MISSING and name not in told:
            raise InputError(f"{section_of(where)} has no {name}; write {name} = … under it.")
    return {name: _of_kind(value, known[name].type, f"{where} {name}".strip()) for name, value in told.items()}


def section_of(where: str) -> str:
    """In words; empty: what stands above all sections."""
    return f"[{where}]" if where else "the file"


def _known(kind: str, told: Mapping[str, Any], known: Any) -> None:
    for name in told:
        if name not in known:
            raise unknown(kind, name, known)


def _of_kind(value: Any, kind: Any, where: str) -> Any:
    """Whole numbers are numbers as well; nothing else is turned into anything."""
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool, str) and type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: 'text in "…"'}
        raise InputError(f"{where} = {value!r} is not {words[kind]}; write {where.split()[-1]} = {words[kind]}.")
    return value
