"""`python -m holdfast_trainer train`: the reference GPT loop, to be read from top to bottom.

It runs as one process, under torchrun, or as a Holdfast job; where it left off it goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from . import contract
from .config import Config, ConfigError, check_world, load
from .contract import Termination
from .data import DataError, TokenDataset
from .model import GPT, flops_per_token, parameter_count
from .optim import Precision, build_optimizer, clip_gradients, learning_rate, precision
from .parallel import accumulate
from .run import Run

log = logging.getLogger("holdfast")

EPILOG = """examples:
  python -m holdfast_trainer train --config gpt.yaml
  python -m holdfast_trainer train --config gpt.yaml train.steps=1000 optim.learning_rate=3e-4
  torchrun --nproc-per-node=2 -m holdfast_trainer train --config gpt.yaml --run-dir runs/a

The run directory keeps checkpoints, logs and the ledger. Start the same command again after an
interruption: it resumes from the newest checkpoint, bit for bit. SIGTERM (or Ctrl-C) saves first.
"""


def main(argv: Sequence[str]) -> int:
    """Train as the configuration says; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m holdfast_trainer train",
        description="Train a GPT on prepared text, alone or under torchrun.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=os.environ.get(contract.ENV_CONFIG),
        help=f"YAML file; default: the one that {contract.ENV_CONFIG} names",
    )
    parser.add_argument("--run-dir", type=Path, help=f"default: {contract.ENV_RUN_DIR}, or ./holdfast-run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="win over the file")
    arguments = parser.parse_args(argv)
    if arguments.config is None and not arguments.overrides:
        parser.error(f"give --config FILE (or set {contract.ENV_CONFIG})")
    try:
        config = load(arguments.config, arguments.overrides)
        check_world(config, int(os.environ.get("WORLD_SIZE", "1")))
        compute = precision(config.train.precision, _device())
        train_data, val_data = open_data(config)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        path = Path(os.environ.get(contract.ENV_TERMINATION_LOG, contract.DEFAULT_TERMINATION_LOG))
        contract.write_termination(path, Termination("failed", 0, 0, str(error), config_error=True))
        return contract.EXIT_CONFIG_ERROR
    # From here on Run sees to it that errors are told, to the engine and to the other ranks.
    train(config, compute, train_data, val_data, arguments.run_dir)
    return 0


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_data(config: Config) -> tuple[TokenDataset, TokenDataset | None]:
    """The training split, and the validation split where it is used. Raises DataError."""
    shape = {"context": config.model.context, "vocab_size": config.model.vocab_size}
    data = config.data
    training = TokenDataset(data.path, "train", **shape, verify=data.verify)
    if not config.validation.every:
        return training, None
    return training, TokenDataset(data.path, "validation", **shape, verify=data.verify)


def train(
    config: Config,
    compute: Precision,
    train_data: TokenDataset,
    val_data: TokenDataset | None,
    run_dir: Path | None,
) -> None:
    """The loop. Raises SystemExit(0) on an agreed stop, CheckpointError, DataError on a damaged shard."""
    settings = config.train
    if settings.threads:
        torch.set_num_threads(settings.threads)
    run = Run(
        run_dir=run_dir,
        config_hash=f"{config.hash()}-{train_data.identity}",
        seed=settings.seed,
        deterministic=settings.deterministic,
        checkpoint_every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        keep_every=config.checkpoint.keep_every,
        flops_per_token=flops_per_token(config.model),
        compute_dtype=compute.dtype,
    )
    share = settings.global_batch // run.world_size
    micro = settings.micro_batch or share
    chunks = share // micro

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens and targets of a step, on its device: [share, context] each."""
        tokens, targets = train_data.batch(
            seed=settings.seed,
            step=step,
            rank=run.rank,
            world_size=run.world_size,
            global_batch=settings.global_batch,
        )
        return tokens.to(run.device, non_blocking=True), targets.to(run.device, non_blocking=True)

    def settle(model: nn.Module) -> torch.Tensor:
        tokens, targets = batch(0)
        with compute.autocast():
            loss: torch.Tensor = model(tokens[:micro], targets[:micro])[1]
        return loss

    torch.manual_seed(settings.seed)  # the same initial weights on every rank
    raw_model = GPT(config.model).to(run.device)
    optimizer = build_optimizer(raw_model, config.optim, run.device)
    model = run.wrap(raw_model, static_graph=chunks == 1, settle=settle)
    if settings.compile:
        model = torch.compile(model, mode=None if settings.compile is True else settings.compile)  # type: ignore[assignment]
    run.track(model=raw_model, optimizer=optimizer, scaler=compute.scaler)
    if run.rank == 0:
        log.info(
            "%.1f M parameters, %s on %s, %d ranks, %d x %d sequences a rank, attempt %d",
            parameter_count(config.model) / 1e6,
            compute.name,
            run.device,
            run.world_size,
            chunks,
            micro,
            run.attempt,
        )

    for step in run.steps(settings.steps):
        if val_data and step and step % config.validation.every == 0:
            run.log(val_loss=validate(run, raw_model, val_data, config, compute))

        rate = learning_rate(config.optim, step, settings.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with run.span("data"):
            tokens, targets = batch(step)

        total = torch.zeros((), device=run.device)
        for chunk in range(chunks):
            rows = slice(chunk * micro, (chunk + 1) * micro)
            with accumulate(model, last=chunk == chunks - 1):
                with run.span("forward"), compute.autocast():
                    loss = model(tokens[rows], targets[rows])[1] / chunks
                with run.span("backward"):
                    compute.scaler.scale(loss).backward()
            total += loss.detach()
        run.log(loss=total, tokens=tokens.numel(), samples=share)

        with run.span("optimizer"):
            compute.scaler.unscale_(optimizer)
            norm = clip_gradients(raw_model.parameters(), config.optim.clip)
            compute.scaler.step(optimizer)
            compute.scaler.update()
            optimizer.zero_grad(set_to_none=True)

        if (step + 1) % settings.log_every == 0:
            run.log(grad_norm=norm)
            if run.rank == 0:
                log.info("step %d: %s, rate %.2e", step + 1, run.summary(), rate)

    if val_data:
        run.log(val_loss=validate(run, raw_model, val_data, config, compute))


@torch.no_grad()
def validate(run: Run, model: nn.Module, data: TokenDataset, config: Config, compute: Precision) -> float:
    """Mean loss over the same `validation.batches` global batches every time; touches no random state."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    with run.span("validation"):
        for index in run.interruptible(range(config.validation.batches)):
            tokens, targets = data.batch(
                seed=0,
                step=index,
                rank=run.rank,
                world_size=run.world_size,
                global_batch=config.train.global_batch,
            )
            with compute.autocast():
                total += model(tokens.to(run.device), targets.to(run.device))[1].double()
    model.train()
    return run.mean(float(total) / config.validation.batches)
