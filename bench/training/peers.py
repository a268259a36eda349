"""The trainers that people use, each as its own documentation says to use it, around the same model.

`same` gives them what the others have: bf16 (or what the device has), fused AdamW, clipping. Without it
they run as they come: their own defaults, the same batch.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from holdfast_trainer.optim import build_optimizer

from .gate import Gate
from .subjects import Loss
from .work import STEPS, Work

EPOCHS = 1_000_000


class Rows(Dataset[dict[str, Tensor]]):
    """The batches of the others, row by row, all ranks' side by side, as a sampler deals them out."""

    def __init__(self, work: Work) -> None:
        whole = Work(work.config, work.compute, work.device, 0, 1)
        self._rows = [row for pair in whole.pool() for row in zip(*pair, strict=True)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, targets = self._rows[index]
        return {"input_ids": tokens, "labels": targets}


def hf_trainer(work: Work, gate: Gate, *, same: bool, compiled: bool = False) -> None:
    from transformers import Trainer, TrainingArguments

    optim = work.config.optim
    alike: dict[str, Any] = {}
    if same:
        alike = {
            "bf16": work.compute.name == "bf16",
            "fp16": work.compute.name == "fp16",
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "cosine",
            "learning_rate": optim.learning_rate,
            "weight_decay": optim.weight_decay,
            "adam_beta1": optim.beta1,
            "adam_beta2": optim.beta2,
        }
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=work.config.data.prepared.parent),
        max_steps=STEPS,
        per_device_train_batch_size=work.rows,
        save_strategy="no",
        report_to="none",
        torch_compile=compiled,
        use_cpu=work.device.type == "cpu",
        ddp_backend=None if work.world_size == 1 else "gloo" if work.device.type == "cpu" else "nccl",
        **alike,
    )
    gate.install()
    Trainer(model=Loss(work.model()), args=arguments, train_dataset=Rows(work)).train()


def lightning(work: Work, gate: Gate, *, same: bool) -> None:
    import lightning as lit

    class Module(lit.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.loss = Loss(work.model())

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.loss(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            if not same:
                return torch.optim.AdamW(self.parameters(), 6e-4)
            optimizer = build_optimizer(self, work.config.optim, work.device)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            if same:  # its own refuses fused optimizers
                nn.utils.clip_grad_norm_(self.parameters(), work.config.optim.clip)

    strategy: Any = "auto"
    if work.world_size > 1:
        from lightning.pytorch.strategies import DDPStrategy

        strategy = DDPStrategy(process_group_backend="gloo" if work.device.type == "cpu" else "nccl")
    trainer = lit.Trainer(
        accelerator="cpu" if work.device.type == "cpu" else "gpu",
        devices=work.world_size,
        strategy=strategy,
        precision=_lightning_precision(work) if same else "32-true",
        max_steps=STEPS,
        max_epochs=EPOCHS,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=tempfile.mkdtemp(dir=work.config.data.prepared.parent),
    )
    gate.install()
    trainer.fit(Module(), DataLoader(Rows(work), batch_size=work.rows))


def fabric(work: Work, gate: Gate, *, same: bool) -> None:
    """Lightning Fabric with a loop by hand, which is what litgpt's pretraining is."""
    import lightning as lit

    lab = lit.Fabric(
        accelerator="cpu" if work.device.type == "cpu" else "gpu",
        devices=1,
        precision=_lightning_precision(work) if same else "32-true",
    )
    lab.launch()
    raw = Loss(work.model())
    model, optimizer = lab.setup(raw, build_optimizer(raw, work.config.optim, work.device))
    loader = lab.setup_dataloaders(DataLoader(Rows(work), batch_size=work.rows))
    gate.install()
    step = 0
    while True:
        for batch in loader:
            for group in optimizer.param_groups:
                group["lr"] = work.rate(step)
            loss = model(**batch)["loss"]
            lab.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), work.config.optim.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1


def _lightning_precision(work: Work) -> Any:
    return {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}[work.compute.name]
