"""A plain loop over a convolutional network with BatchNorm, for comparison with own_loop_batchnorm.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def block(channels: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2))


torch.manual_seed(1)
images, labels = torch.randn(64, 3, 8, 8), torch.randint(10, (64,))
model = nn.Sequential(block(3, 8), block(8, 16), nn.Flatten(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(images, labels), batch_size=16)

for _epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.8f}")

model.eval()
print(f"evaluated {nn.functional.cross_entropy(model(images), labels).item():.8f}")
