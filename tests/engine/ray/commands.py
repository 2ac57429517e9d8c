"""Loops of replicas, and programs of their own process: two that are ended, and one on Ray's cluster of two nodes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.engine.server import push_stream

ENDLESS = """
import functools, sys, torch
from paceline import Program, train

inputs, targets = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
program = Program(model=lambda: torch.nn.Linear(4, 3), loss=torch.nn.functional.cross_entropy, batch_size=4,
                  optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(inputs, targets))
train(program, "replicas=1", engine="ray", steps=10**9, out=sys.argv[1], progress=False)
"""

SAVED = (
    ENDLESS.replace("out=sys.argv[1]", "checkpoint=sys.argv[1], checkpoint_every='20 steps'")
    .replace("train(program", "run = train(program")
    .replace("import functools", "import functools, json")
    + "print(json.dumps({name: run.summary[name] for name in ('interrupted', 'updates')}))"
)

TWO_NODES = """
import contextlib, functools, json, sys, torch
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray.cluster_utils import Cluster
from paceline import InputError, Program, train
from paceline.api.train import check, open_engine

inputs, targets = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
program = Program(model=lambda: torch.nn.Linear(4, 3), loss=torch.nn.functional.cross_entropy, batch_size=4,
                  optimizer=functools.partial(torch.optim.SGD, lr=0.1), train=(inputs, targets))
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
ray.init(cluster.address)
where = NodeAffinitySchedulingStrategy(second.node_id, soft=False)
@ray.remote(num_cpus=0, scheduling_strategy=where)
def there():
    return True
while True:  # the first node hears of the second a little later than others do
    with contextlib.suppress(ray.exceptions.RayError):
        if ray.get(there.remote()):
            break
said = {}
with open_engine("ray:auto") as engine:
    run = train(program, "replicas=2", engine=engine, steps=5, trace=True, progress=False)
    places = [engine._pool.locations[actor] for actor in engine._pool.replicas]
    here = engine._pool.locations[engine._pool.server].node
    said["nodes"] = len({place.node for place in places})
    said["updates"] = run.summary["updates"]
    said["lanes"] = sorted({span.replica for span in run.spans})
    ends = {span.step: span.end_ns for span in run.spans if span.action == "apply"}
    said["in order"] = all(s.start_ns < ends[s.step] for s in run.spans if s.action == "push")
    far = next(r for r, place in enumerate(places) if place.node != here)
    lose = lambda progress: progress.updates > 3 and cluster.list_all_nodes()[1:] and cluster.remove_node(second)
    import importlib
    @contextlib.contextmanager
    def watcher(*_):
        yield lose
    importlib.import_module("paceline.api.train").watcher = watcher
    run = train(program, "replicas=2", engine=engine, seconds=5)
    said["left"] = [d.reason for d in run.left]
    said["the far one left"] = [d.replica for d in run.left] == [far]
    said["went on"] = run.summary["seconds"] == 5 and run.history[-1].updates > 3
said["its own connection stays"] = ray.is_initialized()
said["still there"] = len([n for n in ray.nodes() if n["Alive"]])
try:
    train(program, "replicas=1", engine="ray", steps=2, progress=False)
except InputError as error:
    said["refused"] = str(error)
ray.shutdown()
check(program, "replicas=1 device=cuda", engine=f"ray:{cluster.address}", steps=2)
said["its GPUs count, not this host's"] = True
said["connected"] = ray.is_initialized()
cluster.shutdown()
print(json.dumps(said))
"""


def started(program: str, folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Start a program in a session of its own, with passing files in a folder."""
    environment = os.environ | {
        "TMPDIR": str(folder),
        "RAY_TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def plain(worker: Any) -> None:
    """One step a batch."""
    for batch in worker.batches():
        worker.step(batch)


def pushing(worker: Any, *, way: str, loop: Callable[[Any], None] = plain) -> None:
    """A loop of replicas that push in one of the ways that there are."""
    host_id = push_stream.host_id
    if way == "bytes":
        push_stream.host_id = lambda: "another host"
    elif way == "calls":
        worker._client._link._tries = 0
    try:
        loop(worker)
        stream = worker._client._link._stream
        assert way == ("calls" if stream is None else "memory" if stream._shared else "bytes")
    finally:
        push_stream.host_id = host_id
