"""7. Smooth Switch over pipelines: at first each replica at its own pace, at the end all in step."""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16


def model() -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(64, 10))


program = paceline.Program(
    model=model,
    loss=nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.Adam, lr=0.003),
    train=(images[:1500], labels[:1500]),
    test=(images[1500:], labels[1500:]),
    global_batch_size=64,
)

run = paceline.train(
    program, "replicas=2 stages=2 micro_batches=4 aggregation=smooth-switch:every=50", steps=100, evaluate_every=100
)
print(f"test loss {run.summary['test_loss']:.4f}, accuracy {run.summary['test_accuracy']:.1%}")
