"""A loop that trains on text as it lies there: in `HOLDFAST_STREAM`, by the file `HOLDFAST_TOKENIZER`.

Where `PEERS` has the library `datasets`, that streams the Parquet files; nothing is downloaded.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from holdfast_trainer.run import Run
from holdfast_trainer.token_stream import TokenStream

run = Run(checkpoint_every=7)
torch.manual_seed(1)
model = run.wrap(nn.Sequential(nn.Embedding(512, 16), nn.Dropout(0.1), nn.Linear(16, 512)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
names = os.environ["HOLDFAST_STREAM"].split(":")
source: Any = [Path(name) for name in names]
if peers := os.environ.get("PEERS"):
    sys.path.append(peers)
    from datasets import load_dataset

    source = load_dataset("parquet", data_files=names, split="train", streaming=True)
stream = TokenStream(
    source,
    Path(os.environ["HOLDFAST_TOKENIZER"]),
    context=512,
    batch=20,
    rank=run.rank,
    world_size=run.world_size,
)
run.track(model=model, optimizer=optimizer, stream=stream)
for step in run.steps(60):
    while os.path.exists(os.environ.get("HOLD", "")) and step >= int(os.environ["HOLD_AT"]):
        time.sleep(0.005)  # the test says when it goes on
    tokens, targets = stream.batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss, tokens=tokens.numel())
    optimizer.step()
