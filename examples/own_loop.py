"""The training loop written out: the same lines for every policy, in every process."""

import functools

import torch
from sklearn.datasets import load_digits

import paceline

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16

program = paceline.Program(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)),
    loss=torch.nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.3),
    train=(images[:1500], labels[:1500]),
    test=(images[1500:], labels[1500:]),
)


def loop(worker: paceline.Worker) -> None:
    """What each replica does: pull A, compute Δ, push it, wait for as long as the policy says."""
    for batch in worker.batches():
        worker.step(batch)


run = paceline.launch(loop, program, "replicas=2 aggregation=smooth-switch:every=50", epochs=10)
print(f"{run.summary['updates']} updates, test accuracy {run.summary['test_accuracy']:.1%}")
