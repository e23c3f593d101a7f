"""The plain loop of own_loop_plain.py on any engine and any number of ranks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipeline.own_loop import prepare

torch.manual_seed(1)
inputs = torch.randn(96, 16)
targets = torch.sin(inputs @ torch.randn(16, 4))
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
model, optimizer, loader = prepare(model, optimizer, loader)

for _epoch in range(2):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss = model.backward(loss)
        model.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.8f}")
