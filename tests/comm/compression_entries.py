"""What the ranks of the compression tests do: every scene once, in one group, and each writes down what it saw.

Ranks meet in a file. Only what a scene returns is looked at, by the tests in ``test_compression.py``.
"""

import datetime
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm_entries import Args, reply
from torch import Tensor

from paceline.compression import Compression, parse
from paceline.core.registry import registered

SHAPES = [(12, 20), (20,), (16, 4, 3, 3), (3, 3), (), (40, 1), (0, 5)]
"""A matrix, a vector, a convolution, one too small to shrink, a number, one too thin to shrink, an empty one."""

ELEMENTS = 12 * 20 + 20 + 16 * 36 + 9 + 1 + 40
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TEXTS = [*registered(Compression), "powersgd:rank=1", "top-k:ratio=0.25", "top-k:ratio=1", "blocks:ratio=0.5,size=50"]
FEEDBACK = [text for text in TEXTS if text.startswith(("powersgd", "top-k", "blocks"))]
STEPS = 4
TIMEOUT = datetime.timedelta(seconds=60)

Group = Any
Seen = dict[str, Any]


def rank(args: Args, fds: list[int]) -> None:
    """One rank of a group."""
    torch.set_num_threads(1)
    number, ranks = args["rank"], args["ranks"]
    store = dist.FileStore(str(Path(args["folder"], "store")), ranks)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks, timeout=TIMEOUT)
    group = dist.distributed_c10d._get_default_group()
    torch.save({name: scene(number, group) for name, scene in SCENES.items()}, Path(args["folder"], f"{number}.pt"))
    dist.destroy_process_group()
    reply(fds[0], number)


def share(number: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A rank's gradient: from 1e-4 to 1e2, as gradients of different layers are."""
    generator = torch.Generator().manual_seed(1000 * number + step)
    normal = torch.randn(ELEMENTS, generator=generator, dtype=dtype)
    return normal * torch.logspace(-4, 2, ELEMENTS, dtype=dtype)


def residual(state: Any) -> Tensor:
    return torch.zeros(ELEMENTS) if state is None else state.residual.clone()


def walk(compression: Compression[Any], shares: list[Tensor], group: Group, *, stops: bool = False) -> Seen:
    """Some steps of one compression; with ``stops``, the state is pickled and read again after each."""
    state = compression.start(SHAPES, shares[0].dtype)
    steps = []
    for given in shares:
        gradient = given.clone()
        sent = compression.all_reduce(state, gradient, group)
        steps.append({"share": given, "sum": gradient, "sent": sent, "residual": residual(state)})
        state = pickle.loads(pickle.dumps(state)) if stops else state
    return {"steps": steps}


def ordinary(number: int, group: Group) -> Seen:
    return {
        f"{text} {name}": walk(parse(text), [share(number, k, dtype) for k in range(STEPS)], group)
        for text in TEXTS
        for name, dtype in DTYPES.items()
    }


def resumed(number: int, group: Group) -> Seen:
    shares = [share(number, k) for k in range(STEPS)]
    return {text: walk(parse(text), shares, group, stops=True) for text in TEXTS}


def whole_numbers(number: int, group: Group) -> Seen:
    """Sums of small whole numbers are exact in every order."""
    given = share(number, 0).clamp(-9, 9).round()
    return {text: walk(parse(text), [given], group) for text in TEXTS}


def zeros(number: int, group: Group) -> Seen:
    return {text: walk(parse(text), [torch.zeros(ELEMENTS)] * 2, group) for text in TEXTS}


def magnitudes(number: int, group: Group) -> Seen:
    """Far beyond what a float16 can hold, at both ends."""
    sizes = (1e-42, 1e-30, 1e-6, 1e6, 1e30, 1e38)
    return {f"{size}": walk(parse("fp16"), [share(number, 0, torch.float32) / 1e3 * size], group) for size in sizes}


def low_rank(number: int, group: Group) -> Seen:
    """Matrices of full rank on each rank, whose sum has rank 2."""
    ranks, shape = group.size(), (18, 24)
    generator = torch.Generator().manual_seed(5)
    thin = torch.randn(18, 2, generator=generator).double() @ torch.randn(2, 24, generator=generator).double()
    noise = torch.randn(ranks, *shape, generator=generator).double()
    noise -= noise.mean(0)
    seen = {}
    for rank in (1, 2, 3):
        compression = parse(f"powersgd:rank={rank}")
        state = compression.start([shape], torch.float64)
        gradient = (thin / ranks + noise[number]).flatten()
        compression.all_reduce(state, gradient, group)
        seen[f"{rank}"] = {"sum": gradient, "expected": thin.flatten(), "residual": residual(state)}
    return seen


def spoiled(number: int, group: Group) -> Seen:
    """In the second of three steps, the last rank's gradient is not finite in one place."""
    seen = {}
    for text in TEXTS:
        for bad in ("inf", "-inf", "nan"):
            shares = [share(number, k) for k in range(3)]
            if number == group.size() - 1:
                shares[1][250] = float(bad)
            seen[f"{text} {bad}"] = walk(parse(text), shares, group)
    return seen


# ------------------------------------------------------------------------------------------------------ least squares


def descend(text: str, group: Group, centre: Tensor, steps: int, *, kept: bool) -> Tensor:
    """Descent on Σ ½·|x − centre|² over the ranks; without ``kept``, what a step has lost is forgotten."""
    compression, point = parse(text), torch.zeros_like(centre)
    state = compression.start([tuple(centre.shape)], centre.dtype)
    for step in range(steps):
        gradient = (point - centre).flatten()
        compression.all_reduce(state, gradient, group)
        point -= gradient.view_as(point) * (0.3 / group.size() / (1 + step / 40))
        if not kept:
            state = compression.start([tuple(centre.shape)], centre.dtype)
    return point


def descents(text: str, group: Group, centres: Tensor, number: int, steps: int) -> Seen:
    kept, forgotten = (descend(text, group, centres[number], steps, kept=kept) for kept in (True, False))
    return {"kept": kept, "forgotten": forgotten, "optimum": centres.mean(0)}


def sparse_descent(number: int, group: Group) -> Seen:
    """One element of eight is sent; along the first, ranks pull to opposite sides, and more than along all others."""
    ranks = group.size()
    centres = torch.randn(ranks, 8, generator=torch.Generator().manual_seed(6)).double()
    centres[:, 0] = 20 * (torch.arange(ranks) - (ranks - 1) / 2)
    return descents("top-k:ratio=0.125", group, centres, number, 600)


def low_rank_descent(number: int, group: Group) -> Seen:
    """Matrices of 24 × 18, one direction at a time."""
    centres = torch.randn(group.size(), 24, 18, generator=torch.Generator().manual_seed(7)).double()
    return descents("powersgd:rank=1", group, centres, number, 400)


SCENES: dict[str, Callable[[int, Group], Seen]] = {
    scene.__name__: scene
    for scene in (
        ordinary,
        resumed,
        whole_numbers,
        zeros,
        magnitudes,
        low_rank,
        spoiled,
        sparse_descent,
        low_rank_descent,
    )
}
