"""An Inception whose seven branch layers are on a worker each, one more before and one behind them, in virtual time.

It prints who is where, and one step: the branches side by side, those of two layers pipelines of their own.
"""

import functools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import paceline
from paceline.metrics.pipeline_step import pipeline_step

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16


class Block(nn.Module):
    """Four branches side by side, joined by their channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.b1 = nn.Conv2d(channels, 16, 1)
        self.b2 = nn.Sequential(nn.Conv2d(channels, 16, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1))
        self.b3 = nn.Sequential(nn.Conv2d(channels, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 5, padding=2))
        self.b4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.cat([self.b1(x), self.b2(x), self.b3(x), self.b4(x)], 1))


def model() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU())
    pooled = nn.Sequential(nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(stem, Block(32), pooled, nn.Linear(64 * 16, 256), nn.ReLU(), nn.Linear(256, 10))


program = paceline.Program(
    model=model,
    loss=nn.functional.cross_entropy,
    optimizer=functools.partial(torch.optim.Adam, lr=0.002),
    train=(images[:1500], labels[:1500]),
    test=(images[1500:], labels[1500:]),
    batch_size=64,
)
STRATEGY = "stages=9 cuts=1.b1,1.b2.0,1.b2.2,1.b3.0,1.b3.2,1.b4.0,1.b4.1,cat micro_batches=4"

print(paceline.show_mesh(STRATEGY), end="\n\n")
run = paceline.train(
    program, STRATEGY, engine="virtual", times="compute=0.036", steps=20, evaluate_every=20, trace=True
)
step = pipeline_step(run.spans, run.strategy, run.summary)
assert step is not None, "it was recorded"
print(step.text(width=70))
print(f"test loss {run.summary['test_loss']:.4f}, accuracy {run.summary['test_accuracy']:.1%}")
