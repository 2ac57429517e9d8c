"""Train a classifier of digits with Lightning."""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import PacelineStrategy


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y, label_smoothing=0.05)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.network(x).argmax(1) == y).double().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    lightning.seed_everything(0)
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    x, order = x.double() / 16, torch.randperm(len(y))
    x, y = x[order], y[order]
    train = DataLoader(TensorDataset(x[:1536], y[:1536]), options.batch_size)
    test = DataLoader(TensorDataset(x[1536:], y[1536:]), 256)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PacelineStrategy(),
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.out, "last", enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
    )
    model = Digits()
    trainer.fit(model, train, test, ckpt_path=options.out / "last.ckpt" if options.resume else None)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), options.out / "model.pt")
        print(f"accuracy {trainer.callback_metrics['accuracy']:.2f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
