"""L-BFGS with a line search for the strong Wolfe conditions, as an optimizer that is stepped by evaluations.

torch's asks for loss and gradient wherever its line search wants them. Here they come from elsewhere: from replicas,
each of which has computed portions of the batch at the parameters as they are. So one step is one evaluation, and the
parameters become the next point to evaluate at, a trial of the line search or the first one of the next iteration::

    x_0 --step--> x_0 + t·d_0 --step--> x_0 + t'·d_0 --step: accepted, is x_1--> x_1 + t·d_1 --step--> ...

Direction (vector-free two-loop recursion: Chen, Wang, Zhou, NIPS 2014): d is a sum of the last m changes s of x, the
last m changes y of the gradient, and the gradient g. Its coefficients follow from the products of these 2m + 1 vectors,
so owners who each have a slice of every vector exchange numbers alone, once an iteration::

    owner 0:  s·s, s·y, ... g·g of its slice --+
                                               +--sum--> all: coefficients --> each owner: d of its slice
    owner 1:  s·s, s·y, ... g·g of its slice --+

Line search: Nocedal and Wright 2006, algorithms 3.5 and 3.6, with cubic interpolation (3.59).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.errors import InputError
from paceline.optim.layers import require

# Sufficient decrease and curvature: constants of the strong Wolfe conditions (torch has the same).
C1, C2 = 1e-4, 0.9

# Differences of losses below so many roundings of their dtype say nothing of a decrease: slopes alone decide then
# (approximate Wolfe conditions: Hager, Zhang 2005, equation 2.2), so that x comes as near to the optimum as it can.
ROUNDINGS = 4

# Trials of one line search, after which the best one is taken.
MOST_TRIALS = 25

# Least s·y of a pair that is kept: others say of no positive curvature.
LEAST_CURVATURE = 1e-10


class LossOptimizer(Optimizer, ABC):
    """An optimizer whose step takes the loss beside the gradients, both of the parameters as they are.

    All of its state lies in ``state``: tensors of its parameters' shapes, and numbers that are the same for each. Sums
    over elements go through :attr:`summed`, so that each of several owners may have a slice of every parameter.
    """

    loss: float | None = None
    """Of the gradients; who has no closure sets it before each step."""
    summed: Callable[[list[float]], list[float]] = list
    """Returns the sums of numbers over all owners of the parameters; as it stands, there is one."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take loss and gradients, of ``closure`` if there is one, and move the parameters; return the loss."""
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.loss = loss.item() if isinstance(loss, Tensor) else float(loss)
        if self.loss is None:
            raise InputError(f"{type(self).__name__}.step() has no loss; write step(closure), or set optimizer.loss")
        self.move(self.loss)
        return self.loss

    @abstractmethod
    def move(self, loss: float) -> None:
        """Move the parameters, whose ``grad`` is there, to where loss and gradient are wanted next."""

    @abstractmethod
    def finish(self) -> None:
        """Move the parameters to the best point that is known: nothing is evaluated any more."""


class Point(NamedTuple):
    """A point of a line search: the step along d, and there the loss and its slope along d."""

    step: float
    loss: float
    slope: float


def interpolated(a: Point, b: Point, bounds: tuple[float, float] | None = None) -> float:
    """Return the step of the least value of the cubic through two points, within bounds or else between the two.

    >>> interpolated(Point(0.0, 1.0, -2.0), Point(2.0, 1.0, 2.0))  # of (x - 1)²
    1.0
    """
    low, high = bounds or (min(a.step, b.step), max(a.step, b.step))
    first, second = (a, b) if a.step <= b.step else (b, a)
    chord = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = chord**2 - a.slope * b.slope
    # A trial may have been at a loss that is no number.
    if not square >= 0:
        return (low + high) / 2
    root = math.sqrt(square)
    ratio = (second.slope + root - chord) / (second.slope - first.slope + 2 * root)
    return min(max(second.step - (second.step - first.step) * ratio, low), high)


@final
class LBFGS(LossOptimizer):
    """Limited-memory BFGS; makes the steps of ``torch.optim.LBFGS(line_search_fn="strong_wolfe")``, an evaluation each.

    Every evaluation must be of the same samples: losses at different parameters are compared. While a line search
    lasts the parameters are at a trial of it; the last accepted point is ``state[p]["x"]``.

    Unlike torch's, tolerances bound Euclidean norms, which owners of slices can sum, instead of largest elements.

    Args:
        params: parameters; groups with options of their own are refused.
        lr: the first trial of each line search, but for the very first, which is lr·min(1, 1/Σ|g|).
        history_size: m, the number of (s, y) that are kept: 2m vectors of each parameter's size, and 5 more.
        tolerance_grad: norm of the gradient at which x stays where it is.
        tolerance_change: change of x, or of the loss, in one iteration at which x stays where it is.

    Raises:
        InputError: a number out of its range, or several groups.

    >>> x = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
    >>> optimizer = LBFGS([x])
    >>> def rosenbrock():
    ...     optimizer.zero_grad()
    ...     loss = (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(60):
    ...     loss = optimizer.step(rosenbrock)
    >>> bool(loss < 1e-12)
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        history_size: int = 10,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
    ) -> None:
        options = {"history_size": history_size, "tolerance_grad": tolerance_grad, "tolerance_change": tolerance_change}
        super().__init__(params, {"lr": lr, **options})
        if len(self.param_groups) > 1:
            raise InputError("LBFGS has one direction for all parameters, not options for groups; write one group")
        require("lr", lr, "above 0", holds=lr > 0, instead="1.0")
        require("history_size", history_size, "1 or more", holds=history_size >= 1, instead="10")
        require("tolerance_grad", tolerance_grad, "0 or above", holds=tolerance_grad >= 0, instead="1e-7")
        require("tolerance_change", tolerance_change, "0 or above", holds=tolerance_change >= 0, instead="1e-9")

    _products: tuple[int, Mapping[tuple[str, str], float]] = (-1, {})
    """Products of the vectors that make up d, by their names, and of how many pairs; computed anew where missing."""

    # ------------------------------------------------------------------------------------------------ state and vectors

    @property
    def _parameters(self) -> list[Tensor]:
        return list(self.param_groups[0]["params"])

    def _number(self, name: str, default: Any = None) -> Any:
        return self.state[self._parameters[0]].get(name, default)

    def _note(self, **numbers: Any) -> None:
        for parameter in self._parameters:
            self.state[parameter].update(numbers)

    def _point(self, name: str) -> Point:
        return Point(*(self._number(f"{name}_{field}") for field in Point._fields))

    def _note_point(self, name: str, point: Point, gradient: Sequence[Tensor]) -> None:
        self._note(**{f"{name}_{field}": value for field, value in zip(Point._fields, point, strict=True)})
        self._keep(f"{name}_gradient", gradient)

    def _vectors(self, name: str) -> list[Tensor]:
        return [self.state[parameter][name] for parameter in self._parameters]

    def _keep(self, name: str, vectors: Sequence[Tensor]) -> None:
        """Keep a copy of vectors under a name, in the memory of what had the name before."""
        for parameter, vector in zip(self._parameters, vectors, strict=True):
            if (kept := self.state[parameter].get(name)) is None:
                self.state[parameter][name] = vector.clone()
            else:
                kept.copy_(vector)

    def _sums(self, *pairs: tuple[Sequence[Tensor], Sequence[Tensor]]) -> list[float]:
        """Return the products of vectors, in one exchange with the other owners."""
        each = [
            torch.stack([torch.dot(a[i].reshape(-1), b[i].reshape(-1)) for a, b in pairs]).tolist()
            for i in range(len(self._parameters))
        ]
        return self.summed([sum(column) for column in zip(*each, strict=True)])

    # ------------------------------------------------------------------------------------------------------- iterations

    def move(self, loss: float) -> None:
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        if self._number("ended"):
            return
        if self._number("trials") is None:
            self._keep("x", self._parameters)
            self._begin(loss, gradient)
            return
        [slope] = self._sums((gradient, self._vectors("direction")))
        self._search(Point(self._number("step"), loss, slope), gradient)

    @torch.no_grad()
    def finish(self) -> None:
        if self._number("trials") is not None:
            for parameter, x in zip(self._parameters, self._vectors("x"), strict=True):
                parameter.copy_(x)

    def _go_to(self, step: float) -> None:
        self._note(step=step)
        for parameter, x, d in zip(self._parameters, self._vectors("x"), self._vectors("direction"), strict=True):
            torch.add(x, d, alpha=step, out=parameter)

    def _end(self) -> None:
        self._note(ended=True, trials=0)
        self.finish()

    def _begin(self, loss: float, gradient: Sequence[Tensor]) -> None:
        """Begin an iteration at x, of which loss and gradient are these."""
        group, iteration = self.param_groups[0], self._number("iteration", 0) + 1
        if iteration == 1:
            ones = [g.sign() for g in gradient]
            square, absolute = self._sums((gradient, gradient), (gradient, ones))
            step, slope = group["lr"] * min(1.0, 1.0 / absolute) if absolute else 0.0, -square
            self._keep("direction", [-g for g in gradient])
            length = math.sqrt(square)
        else:
            step = group["lr"]
            slope, length, square = self._newton(gradient)
        if not math.sqrt(square) > group["tolerance_grad"] or slope > -group["tolerance_change"]:
            self._end()
            return
        start = Point(0.0, loss, slope)
        self._note(iteration=iteration, length=length, trials=0, bracketed=False, stalled=False)
        self._note_point("start", start, gradient)
        self._note_point("low", start, gradient)  # of the trials before the bracket: the last one
        self._go_to(step)

    def _newton(self, gradient: Sequence[Tensor]) -> tuple[float, float, float]:
        """Compute d; return its slope, its norm, and the square of the gradient's norm."""
        pairs = self._pairs()
        names = [f"{kind}{i}" for kind in "sy" for i in pairs] + ["g"]
        vectors = {name: self._vectors(name) for name in names[:-1]} | {"g": list(gradient)}
        dot = self._gram(names, vectors)
        weight = dict.fromkeys(names, 0.0) | {"g": -1.0}

        def product(name: str) -> float:
            return sum(weight[other] * dot[other, name] for other in names if weight[other])

        alphas = {}
        for i in reversed(pairs):
            alphas[i] = product(f"s{i}") / dot[f"s{i}", f"y{i}"]
            weight[f"y{i}"] -= alphas[i]
        if pairs:
            last = pairs[-1]
            scale = dot[f"s{last}", f"y{last}"] / dot[f"y{last}", f"y{last}"]
            weight = {name: scale * value for name, value in weight.items()}
        for i in pairs:
            weight[f"s{i}"] += alphas[i] - product(f"y{i}") / dot[f"s{i}", f"y{i}"]
        direction = [weight["g"] * g for g in gradient]
        for name in names[:-1]:
            torch._foreach_add_(direction, vectors[name], alpha=weight[name])
        self._keep("direction", direction)
        square = sum(weight[a] * weight[b] * dot[a, b] for a in names for b in names)
        return product("g"), math.sqrt(max(0.0, square)), dot["g", "g"]

    def _pairs(self) -> list[int]:
        """Return the places of the pairs (s, y) that are kept, the oldest first."""
        count, size = self._number("pairs", 0), self.param_groups[0]["history_size"]
        return [k % size for k in range(max(0, count - size), count)]

    def _gram(self, names: Sequence[str], vectors: Mapping[str, list[Tensor]]) -> Mapping[tuple[str, str], float]:
        """Return the products of all these vectors; those that are not known yet are summed in one exchange."""
        counted, products = self._products
        newest = self._pairs()[-1:]
        known = dict(products) if counted == self._number("pairs", 0) - 1 else {}  # else state was loaded
        fresh = {f"{kind}{i}" for kind in "sy" for i in newest} | {"g"}
        every = [(a, b) for i, a in enumerate(names) for b in names[i:]]
        unknown = [pair for pair in every if pair not in known or fresh.intersection(pair)]
        sums = self._sums(*((vectors[a], vectors[b]) for a, b in unknown))
        for (a, b), value in zip(unknown, sums, strict=True):
            known[a, b] = known[b, a] = value
        self._products = self._number("pairs", 0), known
        return known

    # ------------------------------------------------------------------------------------------------------ line search

    def _search(self, new: Point, gradient: Sequence[Tensor]) -> None:
        """Take a trial of the line search."""
        start, low = self._point("start"), self._point("low")
        trials = self._number("trials") + 1
        self._note(trials=trials)
        enough = new.loss <= start.loss + C1 * new.step * start.slope
        flat = abs(new.slope) <= -C2 * start.slope
        level = ROUNDINGS * torch.finfo(self._parameters[0].dtype).eps * abs(start.loss)
        if abs(new.loss - start.loss) <= level and C2 * start.slope <= new.slope <= (2 * C1 - 1) * start.slope:
            self._accept(new, gradient)
            return
        if self._number("bracketed"):
            high = self._point("high")
            if not enough or new.loss >= low.loss:
                self._note_point("high", new, gradient)
            elif flat:
                self._accept(new, gradient)
                return
            else:
                if new.slope * (high.step - low.step) >= 0:
                    self._note_point("high", low, self._vectors("low_gradient"))
                self._note_point("low", new, gradient)
            self._zoom()
            return
        worse = trials > 2 and new.loss >= low.loss
        if enough and not worse and flat:
            self._accept(new, gradient)
        elif not enough or worse or new.slope >= 0 or trials > MOST_TRIALS:
            before = start if trials > MOST_TRIALS and enough and not worse and new.slope < 0 else low
            self._bracket(before, new, gradient)
        else:  # still downhill: further
            step = interpolated(low, new, (new.step + 0.01 * (new.step - low.step), 10 * new.step))
            self._note_point("low", new, gradient)
            self._go_to(step)

    def _bracket(self, before: Point, new: Point, gradient: Sequence[Tensor]) -> None:
        """Go on between two points, of which the one of less loss is ``low``."""
        kept = self._vectors("start_gradient" if before.step == 0.0 else "low_gradient")
        if not new.loss < before.loss:  # nor where it is no number
            self._note_point("high", new, gradient)
            self._note_point("low", before, kept)
        else:
            self._note_point("high", before, kept)
            self._note_point("low", new, gradient)
        self._note(bracketed=True)
        self._zoom()

    def _zoom(self) -> None:
        """Go to a point inside the bracket, or accept its better end if it is too narrow."""
        low, high = self._point("low"), self._point("high")
        narrow = abs(high.step - low.step) * self._number("length") < self.param_groups[0]["tolerance_change"]
        if self._number("trials") > MOST_TRIALS or narrow:
            self._accept(low, self._vectors("low_gradient"))
            return
        least, most = min(low.step, high.step), max(low.step, high.step)
        step, margin = interpolated(low, high), 0.1 * (most - least)
        near = min(most - step, step - least) < margin
        # A second trial in a row close to an end, or one at it, is moved inside.
        if near and (self._number("stalled") or step >= most or step <= least):
            step = most - margin if abs(step - most) < abs(step - least) else least + margin
            near = False
        self._note(stalled=near)
        self._go_to(step)

    def _accept(self, new: Point, gradient: Sequence[Tensor]) -> None:
        """End the iteration at a point, and begin the next one there."""
        start, group = self._point("start"), self.param_groups[0]
        gradient = [g.clone() for g in gradient]  # it may be one of the state's own vectors, which are overwritten
        moved = [d * new.step for d in self._vectors("direction")]
        change = torch._foreach_sub(gradient, self._vectors("start_gradient"))
        curvature, square = self._sums((change, moved), (moved, moved))
        if curvature > LEAST_CURVATURE:
            count = self._number("pairs", 0)
            self._keep(f"s{count % group['history_size']}", moved)
            self._keep(f"y{count % group['history_size']}", change)
            self._note(pairs=count + 1)
        torch._foreach_add_(self._vectors("x"), moved)
        if math.sqrt(square) <= group["tolerance_change"] or abs(new.loss - start.loss) < group["tolerance_change"]:
            self._end()
        else:
            self._begin(new.loss, gradient)
