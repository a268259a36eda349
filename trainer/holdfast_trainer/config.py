"""The training configuration: what each key means, in which unit, and why its default is what it is.

`load` reads a YAML file, lays overrides and the job's environment over it and gives one frozen
`Config`, checked once. What needs the world size (`check_world`) is checked when it is known.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from .contract import CHECKPOINT_EVERY, ENV_CHECKPOINT_EVERY, ENV_CHECKPOINT_KEEP
from .data_config import DataConfig, StreamConfig
from .model_config import LLAMA_ALONE, ModelConfig, divisors
from .schema import ConfigError, Positive, Range, from_mapping, parse_scalar, read_yaml

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "StreamConfig",
    "TrainConfig",
    "ValidationConfig",
    "check_world",
    "from_mapping",
    "load",
    "settings_in_common",
]

Count = Annotated[int, Range(0)]
Snapshots = Literal["overlapped", "synchronous"]
"""See `CheckpointConfig.snapshot`."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, and how exactly."""

    steps: Positive
    """Optimizer steps of the whole run; the schedule ends here too."""
    global_batch: Annotated[int, Range(1, 1 << 30)]
    """Sequences in one step, of all ranks together; the number of ranks must divide it, and each has its
    share. It stays the same however many ranks there are."""
    micro_batch: Positive | None = None
    """Sequences in one forward pass of a rank; lower it where a step does not fit the memory. null: the
    rank's whole share of global_batch at once. It must divide that share; gradients of the passes are added
    up."""
    init_from: Path | None = None
    """Weights to begin with instead of random ones: GPT-2's or Llama's, a local model.safetensors in Hugging
    Face's layout or the directory that holds it, in one file or several. A run that resumes has its own."""
    seed: Annotated[int, Range(0, (1 << 64) - 1)] = 1337
    """Seed of the initial weights, of dropout and of the order of samples; another one is another
    training."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the matrix products; weights stay fp32 (with fsdp a rank's share of them: they are
    gathered in bf16, and so is what one block hands to the next). auto: bf16 where the device is faster in
    it, else fp16 on CUDA, else fp32."""
    deterministic: bool = True
    """Deterministic kernels only, so that a resumed run repeats the untouched one bit for bit; where the
    device has none for an operation, the run ends and names it. false: any kernel, which may be faster on a
    GPU (cuDNN measures its own for each shape and takes the fastest); a resume is then not bit-exact."""
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        False
    )
    """torch.compile the model; true, or one of its modes. false by default: compiling takes time at each
    start, which only long runs win back. reduce-overhead and max-autotune record CUDA graphs only with a
    single rank whose micro_batch is its whole share."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several ranks: ddp keeps the whole model on each, fsdp (FSDP2) cuts parameters, gradients and
    optimizer state over them, for models that do not fit: no rank ever holds all of them, on this machine
    either, where as many ranks go on. Either resumes what the other saved."""
    activation_checkpointing: bool = False
    """Keep only the input of each block and compute the rest again in the backward pass: about a third
    more work for a fraction of the activations, so a larger micro_batch fits."""
    fused_optimizer: bool = True
    """AdamW with one kernel for all parameters, where the device has it. false: a loop over them, slower; for
    comparison."""
    fused_loss: bool = True
    """Cross-entropy by kernels of its own, which keep nothing in fp32: in bf16 or fp16 on an NVIDIA GPU from
    Ampere on, where nothing is compiled. false: PyTorch's, in more time and memory; for comparison, or to go
    on with the bits of an earlier version."""
    fused_layers: bool = True
    """Norms, GELU and SwiGLU, residual additions and what attention's gradient has besides its products by
    kernels of its own: on a CPU of x86, in bf16 or fp32, where nothing is compiled; outside of the image they
    take g++ once. false: PyTorch's, which are slower; for comparison, or to go on with the bits of an earlier
    version."""
    tf32: bool = True
    """TensorFloat-32 for the matrix products that stay fp32 on a CUDA device: several times as fast, with 10
    bits of mantissa instead of 23."""
    threads: Positive | None = None
    """Threads of each rank for operators on the CPU. null: OMP_NUM_THREADS, or what torch chooses. Bits
    depend on it."""
    log_every: Positive = 10
    """Steps from one line of the log (loss, speed, time left) to the next."""
    profile: str | None = None
    """Steps to trace on rank 0, such as `20-24` (0 is the first): the file, for Perfetto, is in the attempt's
    directory. These steps are slower. null: none."""
    tensorboard: bool = False
    """Write loss, rates and norms for TensorBoard, to `tensorboard/` in the run directory."""

    def __post_init__(self) -> None:
        if self.profile is not None:
            parse_window(self.profile)

    @property
    def fuses_loss(self) -> bool:
        """Whether it is to be, where the device can; compiled, it is as good already."""
        return self.fused_loss and not self.compile

    @property
    def fuses_layers(self) -> bool:
        """As `fuses_loss`."""
        return self.fused_layers and not self.compile

    @property
    def kernels(self) -> Literal["strict", False]:
        """What `Run` is asked for, and what rehearses it: attention on a GPU repeats its bits only where
        nothing else may vary either."""
        return "strict" if self.deterministic else False


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, and its schedule: linear warm-up, then cosine."""

    learning_rate: Annotated[float, Range(0, open_low=True)] = 6e-4
    """Learning rate at its peak, after the warm-up. The default is GPT-3's for models of about 100 M
    parameters (table 2.1)."""
    min_learning_rate: Annotated[float, Range(0)] | None = None
    """Learning rate at the last step, where the cosine ends. null: a tenth of the peak."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises to its peak; must be fewer than `train.steps`."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """AdamW's weight decay, of matrices only; biases and norms are not decayed."""
    beta1: Annotated[float, Range(0, 1, open_high=True)] = 0.9
    """AdamW's decay of the running mean of the gradient."""
    beta2: Annotated[float, Range(0, 1, open_high=True)] = 0.95
    """AdamW's decay of the running mean of the squared gradient. Below Adam's 0.999: steadier with large
    batches (GPT-3, appendix B)."""
    clip: Annotated[float, Range(0)] = 1.0
    """Largest norm of the gradient of all parameters together: a larger gradient is scaled down to it. 0: no
    clipping."""

    def __post_init__(self) -> None:
        if self.final_learning_rate > self.learning_rate:
            raise ConfigError(
                f"min_learning_rate: {self.final_learning_rate:g} is above learning_rate "
                f"{self.learning_rate:g}; the cosine goes down"
            )

    @property
    def final_learning_rate(self) -> float:
        """Where the cosine ends."""
        if self.min_learning_rate is not None:
            return self.min_learning_rate
        return float(f"{self.learning_rate / 10:.15g}")  # 6e-05, as a person writes a tenth of 6e-04


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out text, measured inside the loop. Changes nothing in the training."""

    every: Count = 0
    """Steps from one validation to the next; 0: none."""
    batches: Positive = 8
    """How many global batches one validation reads; always the same ones, so that losses can be compared."""


_WINDOW = re.compile(r"(\d+)-(\d+)")


def parse_window(text: str) -> range:
    """The steps (0 is the first) that `FIRST-LAST` names. Raises ConfigError."""
    match = _WINDOW.fullmatch(text)
    steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not steps:
        raise ConfigError(
            f"profile: {text!r} is no window of steps; say FIRST-LAST, such as 20-24 for steps 20 to 24"
        )
    return steps


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and how many checkpoints to keep."""

    every: int | str = "auto"
    """How often to save. `auto`: from what a save costs here, between 10 s and 15 minutes apart. Or a number
    of steps such as 500, or seconds such as `90s`. HOLDFAST_CHECKPOINT_EVERY, which a job's
    `spec.checkpoint.every` sets, wins."""
    keep: Positive = 3
    """How many of the newest checkpoints stay on the disk: better more than one, so that there is another if
    the newest is damaged. HOLDFAST_CHECKPOINT_KEEP, which a job's `spec.checkpoint.keep` sets, wins."""
    keep_every: Count = 0
    """A number of steps, such as 10000: the checkpoint of each multiple is saved, whatever `every` says, and
    stays for good. 0: none."""
    keep_best: Count = 0
    """How many checkpoints with the lowest validation losses stay besides the newest; every step that is
    validated is then saved, whatever `every` says. 0: none."""

    snapshot: Snapshots = "overlapped"
    """When parameters and optimizer state are copied: while the next step's forward and backward compute
    (`overlapped`), or before the next step begins (`synchronous`), for a loop in which something other than
    the optimizer writes to them. CHECKPOINTS.md tells what of that is found out."""

    def __post_init__(self) -> None:
        if not re.fullmatch(CHECKPOINT_EVERY, str(self.every)):
            raise ConfigError(
                f"every: {self.every!r} is none of: auto, a number of steps (500), seconds (90s)"
            )


EXECUTION = (
    "init_from",
    "micro_batch",
    "parallel",
    "compile",
    "activation_checkpointing",
    "fused_optimizer",
    "fused_loss",
    "fused_layers",
    "tf32",
    "threads",
    "deterministic",
    "log_every",
    "profile",
    "tensorboard",
)
"""Keys of `train` that say how to compute, not what."""


@dataclass(frozen=True)
class Config:
    """All sections."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        errors = []
        if self.optim.warmup_steps >= self.train.steps and self.optim.warmup_steps:
            errors.append(
                f"optim.warmup_steps: {self.optim.warmup_steps} is not below train.steps "
                f"{self.train.steps}; the run would end before its peak learning rate"
            )
        micro, batch = self.train.micro_batch, self.train.global_batch
        if micro is not None and batch % micro:
            errors.append(_does_not_divide("train.micro_batch", micro, "train.global_batch", batch))
        stream = self.data.stream
        if stream is not None and self.validation.every and not stream.validation_fraction:
            errors.append(
                "validation.every: data.stream keeps no text for it; set data.stream.validation_fraction, "
                "such as 0.01, or validation.every=0"
            )
        if errors:
            raise ConfigError(errors)

    def hash(self) -> str:
        """SHA-256 (hex) of everything that defines the training."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    def defining(self) -> dict[str, Any]:
        """What `hash` is of, by dotted key, as JSON has the values."""
        sections = json.loads(self._canonical())
        keys = {f"{name}.{key}": value for name, body in sections.items() for key, value in body.items()}
        return {"model.family": self.model.family, **keys}

    def _canonical(self) -> str:
        """As JSON, everything that defines the training: model, data order, optimizer.

        Left out: how it is carried out (`EXECUTION`), which changes rounding at most; what only watches
        (validation, checkpoints); and the data, which has an identity of its own (`Tokens.identity`).
        """
        train = dataclasses.asdict(self.train)
        for execution in EXECUTION:
            del train[execution]
        optim = dataclasses.asdict(self.optim) | {"min_learning_rate": self.optim.final_learning_rate}
        model = dataclasses.asdict(self.model)
        if self.model.family == "gpt2":  # as it was before there was another
            for other in ("family", *LLAMA_ALONE):
                del model[other]
        body = {"model": model, "train": train, "optim": optim}
        return json.dumps(body, sort_keys=True, separators=(",", ":"))


def settings_in_common(config: Config) -> dict[str, object]:
    """By dotted key, what must be the same on every rank: all but paths and threads. What is streamed, ranks
    compare by its content (see TokenStream)."""
    sections = dataclasses.asdict(config)
    apart = {"data.path", "data.stream", "train.init_from", "train.threads"}
    keys = {f"{name}.{key}": value for name, body in sections.items() for key, value in body.items()}
    return {key: value for key, value in keys.items() if key not in apart}


def load(
    path: Path | None, overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> Config:
    """The configuration in `path` (None: an empty document), with `section.key=value` overrides.

    Later overrides win over earlier ones, the job's environment (`HOLDFAST_CHECKPOINT_*` in
    `environ`, by default the process's own) wins over both. Raises ConfigError.
    """
    document, places = read_yaml(path) if path is not None else ({}, {})
    if document.get("kind") == "TrainingJob":
        raise ConfigError(
            f"{path} is a TrainingJob, for `holdfast submit`; what is wanted here is its spec.config, in "
            "a file of its own"
        )
    environ = os.environ if environ is None else environ
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {text!r}: expected section.key=value, such as train.steps=200")
        _lay_over(document, places, key.strip(), parse_scalar(value), f"override {text!r}")
    for name, key in ((ENV_CHECKPOINT_EVERY, "checkpoint.every"), (ENV_CHECKPOINT_KEEP, "checkpoint.keep")):
        if environ.get(name):
            _lay_over(
                document, places, key, parse_scalar(environ[name]), f"environment {name}={environ[name]}"
            )
    return from_mapping(Config, document, path or "configuration", places=places)


def _lay_over(document: dict[str, Any], places: dict[str, str], key: str, value: object, place: str) -> None:
    section = document
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents, start=1):
        inner = section.get(parent)
        if inner is None:
            inner = {}
            places.setdefault(".".join(parents[:depth]), place)
        if not isinstance(inner, dict):
            raise ConfigError(f"{place}: {parent} is a value, not a section with keys")
        section[parent] = dict(inner)  # behind an alias it is the very section that stands elsewhere too
        section = section[parent]
    section[last] = value
    places[key] = place


def check_world(config: Config, world_size: int) -> None:
    """Raises ConfigError where the batch can not be shared out evenly among `world_size` ranks."""
    batch, micro = config.train.global_batch, config.train.micro_batch
    if batch % world_size:
        down, up = batch - batch % world_size, batch + world_size - batch % world_size
        near = f"{down} or {up}" if down else str(up)
        ranks = min(divisors(batch), key=lambda n: (abs(n - world_size), n))
        raise ConfigError(
            f"train.global_batch: {batch} sequences can not be shared evenly by {world_size} ranks; use a "
            f"global_batch of {near}, or {ranks} ranks"
        )
    share = batch // world_size
    if micro is not None and share % micro:
        raise ConfigError(
            _does_not_divide(
                "train.micro_batch", micro, f"the share of each of {world_size} ranks, which is", share
            )
        )


def _does_not_divide(name: str, value: int, of: str, total: int) -> str:
    below = max((d for d in divisors(total) if d < value), default=None)
    above = min((d for d in divisors(total) if d > value), default=None)
    near = " or ".join(str(d) for d in (below, above) if d is not None)
    return f"{name}: {value} does not divide {of} {total}; the nearest that do are {near}"
