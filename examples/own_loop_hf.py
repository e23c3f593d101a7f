"""The plain loop of own_loop_hf_plain.py on any engine and any number of ranks."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.own_loop import prepare

torch.manual_seed(1)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
samples = [{"input_ids": (ids := torch.randint(64, (32,))), "labels": ids} for _ in range(64)]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(samples, batch_size=8, shuffle=True)
model, optimizer, loader = prepare(model, optimizer, loader)

for batch in loader:
    loss = model(**batch).loss
    loss = model.backward(loss)
    model.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.8f}")
