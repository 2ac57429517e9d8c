"""Strategy: how one program is trained in parallel, as a value and as a line of text."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypeGuard, final, get_args, get_type_hints

from paceline import compression, schedule
from paceline.aggregation import Aggregation, Synchronous, parse, registered, text_of
from paceline.core.data_order import Partition
from paceline.core.errors import InputError, check_bool, check_choice, check_int, unknown
from paceline.core.mesh import Mesh
from paceline.core.registry import RegisteredClass, own_entries, register_entries
from paceline.core.text_form import ParsedField, format_option, parse_option, split_outside_brackets
from paceline.schedule import Schedule
from paceline.shard_rules import ShardRules

# Activations that a pipeline computes again in backward instead of keeping them.
Recompute: TypeAlias = Literal["none", "boundaries", "all"]

# Samples from which a pipeline takes running statistics.
BatchNorm: TypeAlias = Literal["micro-batch", "mini-batch"]

# Of ``compile=``: one list of operators instead of what torch.compile makes.
GRAPH = "graph"

# Of each number of replicas, stages, shards and micro-batches, which are listed one by one.
MOST = 1_000_000


def _policy(value: Aggregation[Any] | str) -> Aggregation[Any]:
    policy = parse(value) if isinstance(value, str) else value
    if not isinstance(policy, Aggregation):
        raise InputError(f"aggregation={value!r} is no policy; write aggregation=synchronous, or a policy's object.")
    return policy


_SHARD_RULES: ParsedField[ShardRules, Mapping[str, str] | str] = ParsedField(ShardRules(), ShardRules)
_AGGREGATION: ParsedField[Aggregation[Any], Aggregation[Any] | str] = ParsedField(Synchronous(), _policy)


@final
@dataclass(frozen=True)
class Strategy:
    """A mesh of replicas × stages × shards, and how its parts work together. Workers = their product.

    Args:
        replicas: P, the number of workers or groups of workers that compute a Δ each; or its bounds, ``"2..8"``, within
            which replicas may come and go while the run lasts. Then it reads as the upper one.
        least_replicas: the lower bound; None: P is fixed.
        stages: pipeline stages of a replica; or the number of replicas of each stage: ``(3, 1)``.
        shards: parts that each operator is cut into; or one number a stage.
        schedule: order in which a pipeline's stages process the micro-batches, as text: ``sequential``, ``gpipe``,
            ``1f1b``, ``interleaved:chunks=2``, ``zero-bubble``, ``pipedream``, ``pipedream-2bw``.
        micro_batches: m, per step of a pipeline; None: 2 · stages · stage replicas, or 1 under ``pipedream``, where a
            step is one.
        recompute: activations that a pipeline computes again.
        cuts: beginnings of the pipeline's stages after the first, by the full name of a module or of a node of the
            graph; empty: those that balance the stages best.
        shard_rules: strategies of operators instead of the plan's: pattern over full module names -> name of
            a strategy, or ``whole``; a mapping or its text: ``*.c_fc:column,head:whole``.
        stage_memory_bytes: bound on a stage's parameters, their gradients, the optimizer's state and activations;
            None: no bound.
        batchnorm: samples of the running statistics in a pipeline: each micro-batch, as it comes, or the whole
            mini-batch at once. Normalisation is by a micro-batch's in either case.
        aggregation: a policy or its text.
        accumulate: micro-steps per Δ.
        partition: ``global``, or ``disjoint``: each replica has a fixed subset of the training set.
        threads: CPU threads per worker; None: cores // workers, at least 1.
        device: type of the devices that workers compute on, as torch names it: ``cpu``, ``cuda``, ``xpu``, ``mps``, or
            another that is registered; ``auto`` is the accelerator of this host, if it has one.
        compression: of the gradients sent, as text: ``none``, ``fp16``, ``bf16``, ``powersgd:rank=4``,
            ``top-k:ratio=0.01``.
        shard_optimizer: whether each worker keeps a part of the optimizer's state; None: if that saves time or memory.
        shard_parameters: whether each worker keeps a part of the parameters.
        servers: n, the processes that have a slice of A and of the optimizer's state each, on engines whose workers
            share no memory, or in virtual time over a network; None: as many as hosts, as far as each has some MB.
        standby: copies of A and of all that its server knows, in a process of their own that takes over if the server's
            dies: 0 or 1; of several servers, each has one.
        pull_ahead: whether a replica computes on with the A that it has while its Δ is sent and the next A comes; so
            each Δ is of an A that is one exchange older.
        compile: whether forward and backward of each worker's part of the model are compiled by torch.compile, and
            compared with the part itself before it trains; ``"graph"``: forward, loss and backward of a whole model
            run as one list of operators, without Python and without a compiler. Otherwise short steps do so where they
            can't be told apart; see docs/compiled-replicas.md.

    Raises:
        InputError: a value that its field can't have.

    >>> strategy = Strategy(replicas=4, stages=2, micro_batches=8, aggregation="smooth-switch:every=300")
    >>> print(strategy)
    replicas=4 stages=2 micro_batches=8 aggregation=smooth-switch:every=300
    >>> Strategy.parse(str(strategy)) == strategy, strategy.workers
    (True, 8)
    """

    replicas: int = 1
    stages: int | tuple[int, ...] = 1
    shards: int | tuple[int, ...] = 1
    schedule: str = "1f1b"
    micro_batches: int | None = None
    recompute: Recompute = "none"
    cuts: tuple[str, ...] = ()
    shard_rules: ParsedField[ShardRules, Mapping[str, str] | str] = _SHARD_RULES
    stage_memory_bytes: int | None = None
    batchnorm: BatchNorm = "micro-batch"
    aggregation: ParsedField[Aggregation[Any], Aggregation[Any] | str] = _AGGREGATION
    accumulate: int = 1
    partition: Partition = "global"
    threads: int | None = None
    device: str = "cpu"
    compression: str = "none"
    shard_optimizer: bool | None = None
    shard_parameters: bool = False
    servers: int | None = None
    standby: int = 0
    pull_ahead: bool = False
    compile: bool | Literal["graph"] = False
    least_replicas: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.replicas, str):
            least, most = _bounds(self.replicas)
            object.__setattr__(self, "replicas", most)
            object.__setattr__(self, "least_replicas", least)
        for name, most in _NUMBERS.items():
            if getattr(self, name) is not None or _DEFAULTS[name] is not None:
                check_int(name, getattr(self, name), least=1, most=most)
        if self.least_replicas is not None and self.least_replicas > self.replicas:
            raise InputError(
                f"replicas={self.least_replicas}..{self.replicas}: the lower bound comes first; write "
                f"replicas={self.replicas}..{self.least_replicas}."
            )
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        # One text for each value, so that strategies that mean the same compare equal.
        for name, canonical in _CANONICAL.items():
            object.__setattr__(self, name, canonical(getattr(self, name)))
        for name in ("shard_parameters", "pull_ahead"):
            check_bool(name, getattr(self, name))
        if self.compile not in (True, False, GRAPH):
            raise InputError(f"compile={self.compile}, but it must be true, false or graph; write compile=graph.")
        if not (isinstance(self.device, str) and self.device.isidentifier()):
            raise InputError(
                f"device={self.device!r} is no type of device; write device=cpu, device=cuda or device=auto."
            )
        check_int("standby", self.standby, least=0)
        if self.standby > 1:
            raise InputError(f"standby={self.standby}: a server has one standby, or none; write standby=1.")
        if self.shard_optimizer is not None:
            check_bool("shard_optimizer", self.shard_optimizer)
        object.__setattr__(self, "cuts", (self.cuts,) if isinstance(self.cuts, str) else tuple(self.cuts))
        for name in ("stages", "shards"):
            size = getattr(self, name)
            if isinstance(size, list | tuple):
                object.__setattr__(self, name, tuple(size))
            for part in size if isinstance(size, list | tuple) and size else (size,):
                check_int(name, part, least=1, most=MOST)
        # Checked last: the number of stages is known only after all sizes are whole numbers.
        if isinstance(self.shards, tuple) and len(self.shards) != self.stage_count:
            raise InputError(
                f"shards={format_option(self.shards)} is for {len(self.shards)} stages, but "
                f"stages={format_option(self.stages)} makes {self.stage_count}; write stages={len(self.shards)}, "
                "or one number of shards a stage."
            )

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Return the strategy of a line of ``field=value`` words; ``auto`` is the default of a field that has it."""
        if is_auto(text):
            raise InputError(
                f"strategy={AUTO} is chosen for a program, by train, compare and launch; here write the strategy "
                "itself, replicas=2 for instance."
            )
        values: dict[str, Any] = {}
        if not (words := _words(text)):
            raise InputError(f"strategy={text!r} says nothing; write replicas=1 for one replica, or replicas=4.")
        _refuse_commas(words)
        for word in words:
            name, equals, value = word.partition("=")
            _refuse_policy(word)
            _refuse_unknown(name)
            if not (equals and value):
                raise InputError(f"{word!r} gives {name} no value; write {name}=<value>.")
            if name in values:
                raise InputError(f"the strategy says {name} twice; write {word} once.")
            value = value.replace(" ", "")
            if name in ("shard_rules", *_CLASSES) or (name == "replicas" and ".." in value):
                values[name] = value  # the fields themselves read these
            elif value == "auto" and _DEFAULTS[name] is None:
                values[name] = None
            else:
                values[name] = parse_option(name, _HINTS[name], value)
        return cls(**values)

    @classmethod
    def coerce(cls, strategy: "Strategy | str") -> "Strategy":
        """Return ``strategy`` itself, or the strategy of its text."""
        return cls.parse(strategy) if isinstance(strategy, str) else strategy

    @classmethod
    def from_toml(cls, text: str) -> "Strategy":
        """Return the strategy of a flat TOML table of fields.

        Raises:
            InputError: it is no TOML, or a field is unknown or has a value that it can't have.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"the strategy is no TOML: {error}; write lines as replicas = 4.") from error
        for name in table:
            _refuse_unknown(name)
        return cls(**table)

    def to_toml(self) -> str:
        """Return a flat TOML table of all fields that are not left to Paceline."""
        values = ((name, getattr(self, name)) for name in _FIELDS if name != "least_replicas")
        shown = ((name, self.bounds if name == "replicas" and self.elastic else value) for name, value in values)
        return "".join(f"{name} = {_toml(value)}\n" for name, value in shown if value is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Schedule and compression are texts, which another process can't read without the classes of their names.
        values = self.aggregation, schedule.parse(self.schedule), compression.parse(self.compression)
        return _unpickled, (own_entries(*values), self.__dict__)

    def __str__(self) -> str:
        shown = (n for n in _FIELDS[1:] if n != "least_replicas" and getattr(self, n) != _DEFAULTS[n])
        return " ".join([f"replicas={self.bounds}", *(f"{name}={_text(getattr(self, name))}" for name in shown)])

    @property
    def elastic(self) -> bool:
        """Return whether replicas may come and go while the run lasts."""
        return self.least_replicas is not None

    @property
    def bounds(self) -> str:
        """Return the number of replicas, or its bounds.

        >>> Strategy(replicas="2..8").bounds, Strategy(replicas="2..8").replicas
        ('2..8', 8)
        """
        return f"{self.least_replicas}..{self.replicas}" if self.elastic else str(self.replicas)

    @property
    def stage_count(self) -> int:
        """p, the stages of one replica."""
        return len(self.stages) if isinstance(self.stages, tuple) else self.stages

    @property
    def pipelined(self) -> bool:
        """Return whether a replica processes its batches in micro-batches."""
        return self.stage_count > 1 or self.micro_batches is not None or self.replicated

    @property
    def replicated(self) -> bool:
        """Return whether a stage is replicated."""
        return max(self.copies) > 1

    @property
    def copies(self) -> tuple[int, ...]:
        """The number of replicas of each stage."""
        return self.stages if isinstance(self.stages, tuple) else (1,) * self.stages

    @property
    def tensor_parallel(self) -> bool:
        """Return whether operators are divided among workers."""
        return max(self.shards) > 1 if isinstance(self.shards, tuple) else self.shards > 1

    @property
    def spread(self) -> bool:
        """Return whether a replica is several workers, or processes its batches as if it were."""
        return self.pipelined or self.tensor_parallel

    @property
    def micro_batch_count(self) -> int:
        """m, micro-batches of a pipeline's mini-batch."""
        usual = 1 if schedule.parse(self.schedule).updates_each else 2 * self.stage_count * max(self.copies)
        return self.micro_batches or usual

    @property
    def order(self) -> Schedule:
        """The schedule, resolved for m."""
        return schedule.parse(self.schedule).resolved(self.micro_batch_count)

    @property
    def stage_workers(self) -> tuple[int, ...]:
        """The number of workers of each stage of a replica.

        >>> Strategy(stages=(3, 1)).stage_workers, Strategy(stages=2, shards=(2, 1)).stage_workers
        ((3, 1), (2, 1))
        """
        cut = self.shards if isinstance(self.shards, tuple) else (self.shards,) * self.stage_count
        return tuple(n * c for n, c in zip(self.copies, cut, strict=True))

    @property
    def mesh(self) -> Mesh:
        """The position of every worker."""
        return Mesh(self.replicas, self.stage_workers, self.copies)

    @property
    def workers(self) -> int:
        """The number of workers of the whole mesh."""
        return self.mesh.workers


def _unpickled(entries: tuple[RegisteredClass, ...], values: Mapping[str, Any]) -> Strategy:
    """Rebuild a strategy, after the classes of one's own that its texts name are registered in this process."""
    register_entries(entries)
    strategy = object.__new__(Strategy)
    strategy.__dict__.update(values)
    return strategy


AUTO = "auto"


def is_auto(strategy: object) -> TypeGuard[str]:
    """Return whether a strategy is to be chosen for the program.

    >>> is_auto("auto"), is_auto("threads=auto"), is_auto(Strategy())
    (True, False, False)
    """
    return isinstance(strategy, str) and strategy.split()[:1] == [AUTO]


def without_classes(text: str) -> str:
    """Return the text of a strategy without the fields whose values may be of classes that a program's own code has.

    >>> without_classes("stages=2 schedule=first-come aggregation=mine:over=(buffered:k=2)")
    'stages=2'
    """
    kept = [word for word in _words(text) if word.partition("=")[0] not in _CLASSES]
    return " ".join(kept) or str(Strategy())


_FIELDS = tuple(field.name for field in fields(Strategy))
_HINTS = get_type_hints(Strategy)
_DEFAULTS = {name: getattr(Strategy, name) for name in _FIELDS}
_CANONICAL: Mapping[str, Callable[[Any], str]] = {"schedule": schedule.canonical, "compression": compression.canonical}
# Fields whose values may be of classes of one's own.
_CLASSES = ("aggregation", *_CANONICAL)
_NUMBERS: Mapping[str, int | None] = {
    **dict.fromkeys(("replicas", "least_replicas", "micro_batches"), MOST),
    **dict.fromkeys(("accumulate", "stage_memory_bytes", "threads", "servers")),
}
_CHOICES = {name: get_args(_HINTS[name]) for name in ("recompute", "batchnorm", "partition")}


def _words(text: str) -> list[str]:
    return [*filter(None, split_outside_brackets(" ".join(text.split()), at=" "))]


def _bounds(text: str) -> tuple[int, int]:
    least, dots, most = text.partition("..")
    if not (dots and least.strip().isdecimal() and most.strip().isdecimal()):
        raise InputError(f"replicas={text!r} is neither a number nor two bounds; write replicas=4 or replicas=2..8.")
    return int(least), int(most)


def _refuse_unknown(name: str) -> None:
    if name not in _FIELDS:
        raise unknown("strategy field", name, _FIELDS)


def _refuse_policy(word: str) -> None:
    """Raise InputError, with the word to write, where a policy stands without the field that it is the value of."""
    name = word.partition(":")[0]
    if name in registered(Aggregation):
        raise InputError(f"{name} is a policy, not a strategy field; write aggregation={word}.")


def _refuse_commas(words: list[str]) -> None:
    """Raise InputError, with the line to write, where commas stand between fields."""
    # Of a policy's options, buffered:k=4,combine=sum, none has the name of a field, and none is followed by a space.
    between = re.compile(rf"[,;](?=$|({'|'.join(_FIELDS)})=)")
    fields = re.compile(rf"[,;]({'|'.join(_FIELDS)})=")
    if any(between.search(word) for word in words[:-1]) or any(fields.search(word) for word in words):
        line = " ".join(" ".join(between.sub(" ", word).split()) for word in words)
        raise InputError(f"{' '.join(words)!r} has a comma between two fields; a space is enough: write {line!r}.")


def _text(value: object) -> str:
    if isinstance(value, ShardRules):
        return str(value)
    return text_of(value) if isinstance(value, Aggregation) else format_option(value)


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_toml, value))}]"
    text = _text(value)
    return f'"{text}"' if isinstance(value, str | Aggregation | ShardRules) else text
