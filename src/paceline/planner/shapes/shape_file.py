"""What a transformer given as a shape takes and holds on a device: layer by layer, without running any.

::

    block      max(device, host)     device  Σ products (products.py) + bytes of what lies between / memory's bandwidth
                                     host    kernels · what it takes to start one
    embedding  bytes                 looked up, with its gradient
    head       a product and the loss's bytes

Backward makes two products of each of forward's; ``recompute="full"`` runs forward again before it, ``"selective"``
attention's scores alone. Divided among t shards are the matrices, by columns and then by rows, and what lies between
the two; with ``sequence_divided`` what lies between blocks as well.

Sources: what is saved, 2205.05198 section 4; divided products, 1909.08053; the rest of the byte counts are ours, of a
transformer in eager mode.

A model without code, from a TOML file: its shape and how it is trained.

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
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

from paceline.core.errors import InputError, unknown
from paceline.planner import devices
from paceline.planner.base import Arrangement, LayerCost, Numerics, Provenance, Workload
from paceline.planner.cluster import Device
from paceline.planner.shapes import blocks
from paceline.planner.shapes.gemm_time import DeviceEfficiency, RankShare
from paceline.planner.shapes.shape import Shape

DATA_SHEET_SPREAD = 0.37
"""Nine of ten of 268 published runs on GPUs lay within this of what data sheets and shapes say, at most 1.37 times
as long or as short (benchmarks/planner/calibration.md)."""


@final
@dataclass(frozen=True)
class DescribedWorkload(Workload):
    """A shape, how it is trained, and on what.

    Args:
        shape: of the model.
        device: at the precision that it is trained in.
        global_batch: samples of a step.
        precision: ``fp32``, ``tf32``, or else mixed: ``bf16-mixed``, ``fp16-mixed``, ``fp8-mixed``.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        kernels: how well the device's numbers are made use of.

    >>> from paceline.planner.devices import device
    >>> gpt2 = DescribedWorkload(Shape(12, 768, 12, name="gpt2"), device("A100-80GB"), global_batch=64)
    >>> [layer.name for layer in gpt2.layers(Arrangement(replicas=8, micro_batch=8))][:3]
    ['embedding', 'block', 'block']
    """

    shape: Shape
    device: Device
    global_batch: int = 1
    precision: str = "bf16-mixed"
    optimizer: str = "adam"
    kernels: DeviceEfficiency = field(default_factory=DeviceEfficiency)
    held_as: Numerics | None = None
    """Bytes for each parameter; None: by precision and optimizer."""
    spread: float = DATA_SHEET_SPREAD
    """Nothing of it was measured."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """The shape's, or its sizes."""
        return self.shape.name or f"{self.shape.layers}x{self.shape.hidden}"

    @property
    def sample_words(self) -> int:  # type: ignore[override]
        """Its sequence."""
        return self.shape.sequence

    @cached_property
    def numerics(self) -> Numerics:  # type: ignore[override]
        """Of precision and optimizer."""
        return self.held_as or Numerics.of(self.precision, self.optimizer)

    @property
    def provenance(self) -> Provenance:  # type: ignore[override]
        """Of times and bytes."""
        return {
            "layers' times": "computed from the shape and the device's data sheet; nothing of it was measured",
            "activations": "counted as in 2205.05198, section 4",
            "spread": "nine of ten of 268 published runs lay within this factor of what data sheets alone say",
        }

    def flops(self) -> float:
        return self.shape.flops

    def refusal(self, arrangement: Arrangement) -> str | None:
        shape, t = self.shape, arrangement.shards
        keys = shape.kv_heads or shape.heads
        if shape.heads % t or (keys % t and t % keys):
            return f"{shape.heads} heads ({keys} of keys) are not divisible by {t} shards"
        if shape.width % t or (arrangement.sequence_divided and shape.sequence % t):
            return f"ffn {shape.width} or sequence {shape.sequence} is not divisible by {t} shards"
        if arrangement.stages * arrangement.chunks > shape.layers + 2:
            return f"{shape.layers + 2} layers are fewer than {arrangement.stages * arrangement.chunks} parts"
        return None

    def layers(self, arrangement: Arrangement) -> Sequence[LayerCost]:
        element_bytes = 4 if self.precision in ("fp32", "tf32") else 2
        part = RankShare(
            arrangement.micro_batch / arrangement.context,
            arrangement.shards,
            arrangement.recompute,
            arrangement.sequence_divided and arrangement.shards > 1,
            element_bytes,
            _SCORES.get(self.precision, 1.0),
            mask_bytes=element_bytes if self.device.kind == "cpu" else 1,
            cast_bytes=_CAST.get(self.precision, 0),
        )
        return _layers(self.shape, self.device, self.kernels, part)


_SCORES = {"fp8-mixed": 0.5, "fp4-mixed": 0.25}
_CAST = {"fp8-mixed": 2, "fp4-mixed": 1}
"""Once as it is and once transposed, for the products of backward."""


@lru_cache(maxsize=1024)
def _layers(shape: Shape, device: Device, kernels: DeviceEfficiency, part: RankShare) -> tuple[LayerCost, ...]:
    """Blocks are one object, so that whoever adds them up may count it."""
    block = blocks.block(shape, device, kernels, part)
    first, last = blocks.embedding(shape, device, kernels, part), blocks.head(shape, device, kernels, part)
    return (first, *(block,) * shape.layers, last)


PRECISIONS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp8-mixed", "fp4-mixed")
OPTIMIZERS = ("sgd", "momentum", "adam")


@dataclass(frozen=True, slots=True)
class ShapeJob:
    """What the file says.

    >>> text = "[model]\\nlayers = 2\\nhidden = 8\\nheads = 2\\n[train]\\nglobal_batch = 4"
    >>> ShapeJob.from_toml(text).shape.parameters
    412008
    """

    shape: Shape
    global_batch: int
    precision: str = "bf16-mixed"
    optimizer: str = "adam"

    @classmethod
    def from_toml(cls, text: str, name: str = "") -> "ShapeJob":
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


def read(path: Path) -> ShapeJob:
    """From a file.

    Raises:
        InputError: it can't be read, or see :meth:`ShapeJob.from_toml`.
    """
    return ShapeJob.from_toml(text_of(path), path.stem)


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
