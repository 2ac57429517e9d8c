"""Those who take turns at a stage as ranks of torch.distributed."""

from typing import final

from torch import Tensor

from paceline.engine.team.traffic import Traffic
from paceline.replica.pipeline.copies import Copies


@final
class GroupCopies(Copies):
    """One rank's.

    Args:
        traffic: of the run, whose group has these copies alone; counts what is sent.
        copy: which of them this is.
    """

    def __init__(self, traffic: Traffic, copy: int) -> None:
        super().__init__(first=copy == 0)
        self._traffic, self._copy = traffic, copy

    def add_up(self, vector: Tensor, what: str) -> None:
        self._traffic.all_reduce([vector], f"{what}, from those who take turns with copy {self._copy}")
