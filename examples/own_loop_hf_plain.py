"""A plain loop over a Hugging Face model, for comparison with own_loop_hf.py."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(1)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
samples = [{"input_ids": (ids := torch.randint(64, (32,))), "labels": ids} for _ in range(64)]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(samples, batch_size=8, shuffle=True)

for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.8f}")
