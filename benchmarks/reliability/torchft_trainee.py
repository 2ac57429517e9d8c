"""A comparator: torchft, four replica groups of one process each, a lighthouse, and a loop that starts again who dies.

It takes the same words as ``trainee.py`` and writes the same log, so that the same injector disturbs it.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

REPLICAS = 4


def supervise(settings: dict[str, Any]) -> None:
    """Start lighthouse and replicas, and each that dies again, until one has ended well; then wait for the others."""
    from torchft._torchft import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    port = lighthouse.address().rpartition(":")[2]  # its host's name need not lead to where it listens
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

    def start(replica: int) -> "subprocess.Popen[bytes]":
        words = json.dumps(settings | {"replica": replica})
        return subprocess.Popen([sys.executable, __file__, words], env=environment)

    replicas = {replica: start(replica) for replica in range(REPLICAS)}
    deadline = time.monotonic() + 200.0
    while replicas and time.monotonic() < deadline:
        for replica, process in list(replicas.items()):
            if process.poll() == 0:
                del replicas[replica]
            elif process.poll() is not None:
                replicas[replica] = start(replica)
        time.sleep(0.05)
    lighthouse.shutdown()


def train(settings: dict[str, Any]) -> None:
    """Train as one replica group."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from workloads import workload

    torch.set_num_threads(1)
    program = workload("W1", settings["data"])
    torch.manual_seed(0)
    model = program.build()
    plain = program.optimizer(model.parameters())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load(values: dict[str, Any]) -> None:
        model.load_state_dict(values["model"])
        plain.load_state_dict(values["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    bound = timedelta(seconds=settings.get("timeout_s", 10.0))
    replica: int = settings["replica"]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=bound),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=2,
        timeout=bound,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica-{replica}",
        hostname="127.0.0.1",
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    inputs, targets = program.train
    with open(settings["log"], "a", buffering=1) as log:
        while (step := manager.current_step() + 1) <= settings["steps"]:
            first = (step * REPLICAS + replica) * 32 % (len(targets) - 32)
            log.write(f"{time.monotonic():.6f} {replica} {step} {os.getpid()}\n")
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs[first : first + 32]), targets[first : first + 32]).backward()
            optimizer.step()
            time.sleep(settings.get("pause_s", 0.005))
    values = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    print(json.dumps({"rank": replica, "parameters": hashlib.sha256(values.numpy().tobytes()).hexdigest()}), flush=True)
    with contextlib.suppress(Exception):  # the others may have ended
        manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    train(given) if "replica" in given else supervise(given)
