"""A loader of the user's own that has no batch for anybody, and one that has none for this replica alone."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import InputError
from paceline.replica.divided_loader import divided

THREE = TensorDataset(torch.arange(3))


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "loader",
    [DataLoader(THREE, 4, drop_last=True), DataLoader(THREE, sampler=[]), DataLoader(Empty(), batch_size=2), []],
    ids=["drop_last", "sampler", "stream", "list"],
)
def test_a_pass_without_any_batch_is_refused_on_all_replicas(loader: Iterable[Any], replicas: int) -> None:
    for replica in range(replicas):
        with pytest.raises(InputError, match=r"the loader gave no batch in a whole pass.*write drop_last=False"):
            list(divided(loader, replica, replicas, seed=0))


@pytest.mark.parametrize("loader", [DataLoader(THREE, 4), [torch.arange(3)]], ids=["loader", "list"])
def test_a_replica_may_have_none_where_others_have_some(loader: Iterable[Any]) -> None:
    assert [len(list(divided(loader, replica, 3, seed=0))) for replica in range(3)] == [1, 1, 1]
    assert list(divided(loader, 2, 3, seed=0)) == [None]
