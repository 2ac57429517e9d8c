"""How the parts of a pipeline are divided, one table a part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.replica.tensor.table import Sharding


@dataclass(frozen=True)
class Stage:
    """A part of the model, and how it is divided."""

    stage: int
    part: int
    parameters: int
    sharding: Sharding | None
    """None: it is whole."""

    def __str__(self) -> str:
        if self.sharding is None:
            return f"whole, with {self.parameters:,} parameters"
        return str(self.sharding)

    def to_json(self) -> dict[str, Any]:
        """In plain types."""
        divided = {} if self.sharding is None else self.sharding.to_json()
        return {"stage": self.stage, "part": self.part, "shards": 1, "parameters": self.parameters} | divided


@dataclass(frozen=True)
class StagedSharding:
    """Of all parts of a model."""

    stages: Sequence[Stage]

    def __str__(self) -> str:
        """The tables, one below the other."""
        several = len({each.stage for each in self.stages}) < len(self.stages)
        names = (f"stage {each.stage}{f', part {each.part}' if several else ''}" for each in self.stages)
        return "\n\n".join(f"{name}: {each}" for name, each in zip(names, self.stages, strict=True))

    def to_json(self) -> dict[str, Any]:
        """In plain types."""
        return {"stages": [each.to_json() for each in self.stages]}
