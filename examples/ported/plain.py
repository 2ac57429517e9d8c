"""Train a classifier of digits, with a schedule, clipping, early stopping and checkpoints to go on from."""

import argparse
import logging
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/ported"))
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    model.eval()
    loss = correct = count = 0
    with torch.no_grad():
        for x, y in batches:
            out = model(x)
            loss += nn.functional.cross_entropy(out, y, reduction="sum").item()
            correct += (out.argmax(1) == y).sum().item()
            count += len(y)
    model.train()
    return loss / count, correct / count


def fit(args, model, optimizer, scheduler, train, test, first) -> None:
    best, waited = float("inf"), 0
    for epoch in range(first, args.epochs):
        for x, y in tqdm(train, desc=f"epoch {epoch}", leave=False):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.05)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        scheduler.step()
        test_loss, accuracy = evaluate(model, test)
        logging.info("epoch %d: test loss %.4f, accuracy %.2f%%", epoch, test_loss, 100 * accuracy)
        if (epoch + 1) % args.save_every == 0:
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"scheduler": scheduler.state_dict()}, args.out / "last.pt")
        best, waited = (test_loss, 0) if test_loss < best else (best, waited + 1)
        if waited == args.patience:
            break


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    x, order = x.double() / 16, torch.randperm(len(y))
    x, y = x[order], y[order]
    generator = torch.Generator().manual_seed(0)
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), args.batch_size, shuffle=True, generator=generator)
    test = DataLoader(TensorDataset(x[1500:], y[1500:]), 256)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler, first = CosineAnnealingLR(optimizer, args.epochs), 0
    if args.resume:
        saved = torch.load(args.out / "last.pt")
        first = saved["epoch"]
        for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
            part.load_state_dict(saved[name])
    fit(args, model, optimizer, scheduler, train, test, first)
    torch.save(model.state_dict(), args.out / "model.pt")


if __name__ == "__main__":
    main()
