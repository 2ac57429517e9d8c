"""A loop of Lightning Fabric's, joined: fabric_script.py batch_size out."""

import sys

import torch


def main() -> None:
    from lightning.fabric import Fabric

    import paceline

    batch, out = int(sys.argv[1]), sys.argv[2]
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    own = torch.nn.Linear(8, 3).double()
    model, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters(), lr=0.01))
    x, y = torch.randn(64, 8).double(), torch.randint(0, 3, (64,))
    with paceline.join(model=model.module, optimizer=optimizer.optimizer, clip_norm=0.1) as worker:
        for inputs, targets in worker.data(list(zip(x.split(batch), y.split(batch), strict=True))):
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
    if worker.replica == 0:
        torch.save(own.state_dict(), out)


if __name__ == "__main__":
    main()
