"""A small CNN that learns to tell shapes apart in noisy images: an ordinary PyTorch loop."""

import torch
import torch.nn.functional as F
from torch import nn

from holdfast_trainer.run import Run

STEPS = 400


def images_of(step, rank, count=64):
    """Images [count, 1, 16, 16] and labels [count]: 0 is a horizontal bar, 1 a vertical one, 2 a square."""
    random = torch.Generator().manual_seed(step * 1000 + rank)
    labels = torch.randint(3, (count,), generator=random)
    images = torch.randn(count, 1, 16, 16, generator=random)
    for image, label in zip(images, labels, strict=True):
        height, width = ((3, 11), (11, 3), (7, 7))[label]
        top, left = (int(torch.randint(16 - size, (), generator=random)) for size in (height, width))
        image[0, top : top + height, left : left + width] += 1.0
    return images, labels


def main():
    run = Run()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 3),
    )  # fmt: skip
    model = run.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(STEPS):
        images, labels = images_of(step, run.rank)
        images, labels = images.to(run.device), labels.to(run.device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss, samples=len(images))
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
