"""The reference GPT loop, to be read from top to bottom: `python -m holdfast_trainer train`.

`Run` resumes, saves, and stops where all ranks agree; the rest is what any loop does.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from .assembly import Batches, assemble
from .checkpoint import CONFIGURATION, CheckpointError
from .config import Config, parse_window, settings_in_common
from .data import Tokens
from .decoder import Decoder
from .environment import VALIDATED_BY, execution
from .model import flops_per_token, parameter_count
from .model_config import divisors
from .optim import clip_gradients, learning_rate
from .parallel import accumulate
from .precision import Precision, allow_tf32, precision
from .run import Run

log = logging.getLogger("holdfast")


def train(
    config: Config,
    train_data: Tokens,
    val_data: Tokens | None,
    run_dir: str | Path | None,
) -> None:
    """Raises SystemExit(0) on an agreed stop, CheckpointError, DataError on a damaged shard."""
    settings = config.train
    if settings.threads:
        torch.set_num_threads(settings.threads)
    run = Run(
        run_dir=run_dir,
        config_hash=f"{config.hash()}-{train_data.identity}",
        seed=settings.seed,
        deterministic=settings.kernels,
        checkpoint_every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        keep_best=config.checkpoint.keep_best,
        validate_every=config.validation.every,
        snapshot=config.checkpoint.snapshot,
        flops_per_token=flops_per_token(config.model),
        compute_dtype=lambda gang: precision(settings.precision, gang.device, gang).dtype,
        alike={**settings_in_common(config), "the data": train_data.identity},
        profile=parse_window(settings.profile) if settings.profile else range(0),
        tensorboard=settings.tensorboard,
    )
    compute = Precision.of(run.compute_dtype, run.device.type)
    allow_tf32(run.device, settings.tf32)
    batches = Batches(train_data, config, run.rank, run.world_size, run.device)
    run.describe_batches(batches.describe)
    run.memory_remedy = memory_remedy(config, batches.micro)

    resumes = run.has_checkpoint()
    # Published ones may be gone by the time of a resume.
    weights = None if resumes else settings.init_from
    parts = assemble(
        run.gang,
        config,
        compute,
        batches,
        weights=weights,
        resumes=resumes,
        validates=val_data is not None,
        cache=run.run_dir.path / "compiled",
        noticed=lambda: run.noticed,
    )
    raw_model, model, optimizer = parts.raw_model, parts.model, parts.optimizer
    run.hear_waiting(model)
    run.attention = parts.attention
    run.environment[CONFIGURATION] = {**config.defining(), "the data": train_data.identity[:12]}
    run.environment |= execution(
        settings,
        micro_batch=batches.micro,
        compiled=bool(settings.compile) and not parts.not_compiled,
        attention=parts.attention,
        fused_loss=parts.fused_loss,
        layers=parts.layers,
        device_type=run.device.type,
    )
    if config.checkpoint.keep_best:
        run.environment[VALIDATED_BY] = f"validation.batches={config.validation.batches}"
    if train_data.samples is not None:
        run.steps_an_epoch = train_data.samples / settings.global_batch
    run.track(model=raw_model, optimizer=optimizer, scaler=compute.scaler, **train_data.tracked)
    if resumes and not run.step:
        raise CheckpointError(
            f"the checkpoints in {run.run_dir.checkpoints} were removed while this attempt began, which was "
            "to go on from them; the next one begins anew"
        )
    if run.step and settings.init_from is not None and run.rank == 0:
        log.info("the checkpoint of step %d counts, not train.init_from (%s)", run.step, settings.init_from)
    if weights is not None and run.rank == 0:
        log.info("begins with the weights of %s", weights)
    if run.rank == 0:
        log.info(
            "%.1f M parameters, %s on %s, attention by %s%s, %d ranks, %d x %d sequences a rank, attempt %d",
            parameter_count(config.model) / 1e6,
            compute.name,
            run.device,
            parts.attention + (", fused layers" if parts.layers != "torch" else ""),
            ", a fused loss" if parts.fused_loss else "",
            run.world_size,
            batches.chunks,
            batches.micro,
            run.attempt,
        )

    for step in run.steps(settings.steps):
        if val_data and step and step % config.validation.every == 0:
            run.log(val_loss=validate(run, raw_model, val_data, config, compute))

        rate = learning_rate(config.optim, step, settings.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with run.span("data"):
            chunks = batches.batch(step)

        total = torch.zeros((), device=run.device)
        for index, (tokens, targets) in enumerate(chunks):
            with accumulate(model, last=index == len(chunks) - 1):
                with run.span("forward"), compute.autocast():
                    loss = model(tokens, targets)[1] / len(chunks)
                with run.span("backward"):
                    compute.scaler.scale(loss).backward()
            total += loss.detach()

        with run.span("optimizer"):
            compute.scaler.unscale_(optimizer)
            norm = clip_gradients(raw_model.parameters(), config.optim.clip)
            run.log(
                loss=total, grad_norm=norm, tokens=batches.share * config.model.context, samples=batches.share
            )
            compute.scaler.step(optimizer)
            compute.scaler.update()
            optimizer.zero_grad(set_to_none=True)

        if run.rank == 0 and (step + 1) % settings.log_every == 0:
            log.info("step %d: %s, rate %.2e", step + 1, run.summary(), rate)

    if val_data:
        run.log(val_loss=validate(run, raw_model, val_data, config, compute))


@torch.no_grad()
def validate(run: Run, model: Decoder, data: Tokens, config: Config, compute: Precision) -> float:
    """Mean loss over the same `validation.batches` global batches every time; touches no random state."""
    batches = Batches(data, config, run.rank, run.world_size, run.device)
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    with run.span("validation"):
        for index in run.interruptible(range(config.validation.batches)):
            for tokens, targets in batches.batch(index, seed=0):
                with compute.autocast():
                    total += model(tokens, targets)[1].double()
    model.train()
    return run.mean(float(total) / (config.validation.batches * batches.chunks))


def memory_remedy(config: Config, micro: int) -> str:
    """What to change in this configuration where a step does not fit, in order of what it costs."""
    changes = []
    if micro > 1:
        smaller = divisors(micro)[-2]
        changes.append(f"set train.micro_batch to {smaller} (it is {micro}; the global batch stays)")
    if not config.train.activation_checkpointing:
        changes.append("turn train.activation_checkpointing on")
    changes.append("make the model or its context smaller, or take a larger device")
    return f"To fit: {'; or '.join(changes)}"
