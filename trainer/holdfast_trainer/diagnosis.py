"""What is wrong, or could be better, with a run that has not begun: findings from facts.

`Facts` are what was read and measured; `findings` decides, without looking at anything else. Each finding
names the setting to change. `estimate` adds up what a run of these steps will take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from .allocator import PACKAGE
from .attention import MATH
from .config import Config
from .memory_need import FULL_SHARE, largest_micro_batch, memory_need
from .model import parameter_count
from .recommend import Recommended, larger_step
from .run_facts import RunFacts
from .sizes import size_text
from .verdict import OPTIMIZER_SHARE

IDLE_SHARE = 0.5
DATA_SHARE = 0.05
MANY_EPOCHS = 4.0
"""Up to here repeated data is nearly as good as new (Muennighoff et al. 2023)."""
LONG_STEPS_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Facts(RunFacts):
    """Read from the machine and the data, and measured by a few steps. Sizes in bytes, times in seconds."""

    device: str
    device_type: str
    precision: str
    world_size: int
    cores: int
    memory_total: int
    memory_peak: int
    """What the steps took, state and all."""
    samples: int | None
    """Windows of `model.context` tokens in the training split; None where it is streamed."""
    step_seconds: float
    data_seconds: float
    optimizer_seconds: float
    fast_bf16: bool
    validation_seconds: float | None
    not_compiled: str = ""
    """Why the steps ran as they are written although train.compile is on."""
    own_malloc: bool = True
    """Whether memory comes from another malloc than the C library's."""
    attention: str = ""
    """The kernel that attention took (see attention_kernels)."""
    slow_attention: str = ""
    """Why it was not the fastest of those that repeat their bits on this GPU."""
    fused_loss: bool = False
    """Whether it was computed by the kernels of fused_loss.py."""
    large_loss: str = ""
    """Why it was not, though this GPU could."""
    fused_layers: bool = False
    """Whether what they have besides products was computed by layers.cpp."""
    slow_layers: str = ""
    """Why it was not, though this CPU could."""
    bad_loss: str = ""
    """What the losses came to, where that is no finite number."""
    ranks_here: int = 1
    """That share the cores."""


@dataclass(frozen=True)
class Finding:
    """`level`: error (it cannot or should not run so), warning (it wastes), note."""

    level: Literal["error", "warning", "note"]
    setting: str
    message: str


def estimate(config: Config, facts: Facts) -> float:
    """Seconds from start to end of the process: start-up, steps, validations, and the save at the end."""
    total = facts.seconds_of(config.train.steps, facts.step_seconds)
    if config.validation.every and facts.validation_seconds is not None:
        total += -(-config.train.steps // config.validation.every) * facts.validation_seconds
    return total


def findings(config: Config, facts: Facts) -> list[Finding]:
    """All that apply, errors first."""
    found = [
        *_losses(config, facts),
        *_memory(config, facts),
        *_data(config, facts),
        *_saves(config, facts),
        *_computing(config, facts),
        *([Finding("warning", *slow)] if (slow := facts.slow_network()) else []),
        *_settings(config, facts),
    ]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.level))


def out_of_memory(
    config: Config, precision: str, world_size: int, room: int, *, fused_loss: bool = False
) -> Finding:
    """For steps that did not fit the `room` bytes of a rank: what takes them, and what to change."""
    share = config.train.global_batch // world_size
    micro = config.train.micro_batch or share
    need = memory_need(config, precision, world_size, micro, fused_loss=fused_loss)
    fitting = partial(largest_micro_batch, fused_loss=fused_loss)
    correction = max(1.0, room / need.total)  # it took at least what there was
    limit = int(FULL_SHARE * room)
    largest = fitting(config, precision, world_size, limit, correction)
    recomputing = replace(config, train=replace(config.train, activation_checkpointing=True))
    largest_recomputing = fitting(recomputing, precision, world_size, limit, correction)
    told = (
        f"a step with {micro} sequences a pass does not fit: it needs about {size_text(need.total)} "
        f"(state {size_text(need.state)}, activations {size_text(need.activations)}, logits "
        f"{size_text(need.logits)}), and a rank has {size_text(room)}"
    )
    if largest is not None:
        return Finding("error", "train.micro_batch", f"{told}: set it to {largest}, which should fit")
    if largest_recomputing is not None:
        better = f"turn it on and set train.micro_batch to {largest_recomputing}, which should fit"
        return Finding("error", "train.activation_checkpointing", f"{told}: {better}")
    better = f"not even one sequence would: {_cut(config, precision)}, a smaller model or context"
    return Finding("error", "model", f"{told}; {better}, or a larger device")


def _cut(config: Config, precision: str) -> str:
    """How to have a rank hold less of the state, by what is not so already."""
    changes = [] if config.train.parallel == "fsdp" else ["train.parallel=fsdp"]
    changes += ["train.precision=fp32"] if precision == "fp16" else []  # fsdp does not go with its scaler
    return f"use {' and '.join(changes)} with more ranks" if changes else "use more ranks"


def _losses(config: Config, facts: Facts) -> list[Finding]:
    if not facts.bad_loss:
        return []
    setting, remedy = "model", "see whether it is a number with train.precision=fp32"
    if facts.precision == "fp16":
        setting, remedy = "train.precision", "fp16 ends at 65504: take fp32, or a device with bf16"
    elif config.train.init_from is not None:
        setting, remedy = "train.init_from", "see whether these weights are whole"
    told = f"the loss of these steps comes to {facts.bad_loss}, at which a run ends and saves nothing"
    return [Finding("error", setting, f"{told}: {remedy}")]


def _memory(config: Config, facts: Facts) -> list[Finding]:
    share = config.train.global_batch // facts.world_size
    micro = config.train.micro_batch or share
    need = memory_need(config, facts.precision, facts.world_size, micro, fused_loss=facts.fused_loss)
    room = int(FULL_SHARE * facts.memory_total)
    correction = facts.memory_peak / need.total
    largest = largest_micro_batch(
        config, facts.precision, facts.world_size, room, correction, fused_loss=facts.fused_loss
    )
    used = facts.memory_peak / facts.memory_total
    told = f"a step takes {size_text(facts.memory_peak)} of {size_text(facts.memory_total)}"
    if used > FULL_SHARE:
        setting, better = "train.micro_batch", f"set it to {largest}, which should fit"
        if largest is None and not config.train.activation_checkpointing:
            setting, better = "train.activation_checkpointing", "turn it on"
        elif largest is None:
            setting, better = "model", "make it or its context smaller"
        if largest is None:
            better += f", or {_cut(config, facts.precision)}"
        return [Finding("error", setting, f"{told}, too close to all: {better}")]
    if facts.device_type != "cuda" or used >= IDLE_SHARE:
        return []
    if micro < share and largest is not None and largest > micro:
        return [
            Finding(
                "warning",
                "train.micro_batch",
                f"{told}, and gradients are accumulated over {share // micro} passes: {largest} should fit, "
                "which keeps the device busier and computes the same",
            )
        ]
    train = replace(config.train, precision=facts.precision, micro_batch=micro)  # type: ignore[arg-type]
    now = replace(config, train=train)
    as_it_is = Recommended(now, facts.memory_total, need, correction, facts.fused_loss)
    if (fits := larger_step(as_it_is, facts.world_size)) is None:
        return []
    message = f"{told}, though a pass holds a rank's whole share of a step, {share} sequences: there is room "
    message += f"for about {fits}; tune --grow tries larger steps, which need another learning rate"
    return [Finding("note", "train.global_batch", message)]


def _data(config: Config, facts: Facts) -> list[Finding]:
    found = []
    samples = math.inf if facts.samples is None else facts.samples
    epochs = config.train.steps * config.train.global_batch / samples
    if epochs > MANY_EPOCHS:
        message = (
            f"the run goes through the data {epochs:.1f} times; beyond {MANY_EPOCHS:.0f} it learns little "
        )
        message += "new: prepare more text, or do fewer steps"
        found.append(Finding("warning", "train.steps", message))
    if config.train.global_batch > samples:
        message = (
            f"a batch has {config.train.global_batch} sequences and the data {facts.samples}: some come "
        )
        message += "twice within one step"
        found.append(Finding("warning", "train.global_batch", message))
    share = facts.data_seconds / facts.step_seconds
    if share > DATA_SHARE:
        message, setting = f"{share:.0%} of a step waits for data: ", "data.path"
        if config.data.stream is None:
            message += "put it on a local disk"
        else:
            setting = "data.stream"
            message += "it is tokenised meanwhile; prepare does that once, before (then name it in data.path)"
        found.append(Finding("warning", setting, message))
    return found


def _saves(config: Config, facts: Facts) -> list[Finding]:
    found = []
    if problem := facts.outlasts_notice():
        found.append(Finding("warning", "checkpoint", problem))
    every = config.checkpoint.every
    if isinstance(every, int):
        between = every * facts.step_seconds
        if between > LONG_STEPS_SECONDS:
            message = (
                f"a kill without notice loses up to {between / 60:.0f} minutes; auto weighs what a save "
            )
            message += (
                f"costs against that (it takes {facts.save_seconds:.1f} s, most of it beside the steps)"
            )
            found.append(Finding("warning", "checkpoint.every", message))
        elif between < facts.save_seconds:
            message = (
                f"{every} steps take {between:.1f} s and a save {facts.save_seconds:.1f} s: training will "
            )
            message += (
                f"wait for the disk; use auto, or {math.ceil(facts.save_seconds / facts.step_seconds) * 10}"
            )
            found.append(Finding("warning", "checkpoint.every", message))
    if config.checkpoint.keep_best and not config.validation.every:
        message = (
            "none is kept for its validation loss, which nobody measures: set validation.every, such as 500"
        )
        found.append(Finding("warning", "checkpoint.keep_best", message))
    return found


def _computing(config: Config, facts: Facts) -> list[Finding]:
    found = []
    if facts.precision == "fp32" and facts.fast_bf16:
        message = "fp32, and this device multiplies bf16 faster: use auto"
        found.append(Finding("warning", "train.precision", message))
    share = facts.optimizer_seconds / facts.step_seconds
    if not config.train.fused_optimizer:
        message = f"the optimizer goes through its parameters one by one, {share:.0%} of a step: turn it on"
        found.append(Finding("warning", "train.fused_optimizer", message))
    elif share > OPTIMIZER_SHARE:
        message = (
            f"{share:.0%} of a step is the optimizer: it would pay to do more work between two of its steps"
        )
        found.append(Finding("warning", "train.global_batch", message))
    if facts.device_type == "cpu" and not facts.own_malloc:
        message = "memory comes from the C library's malloc; with tcmalloc steps of 10 M parameters took "
        message += f"0.94 of the time: install {PACKAGE}, and a run takes it by itself"
        found.append(Finding("note", "LD_PRELOAD", message))
    if MATH in facts.attention:
        found.append(_unfused(config, facts.device_type))
    if facts.slow_attention:
        key, message = "train.precision", "the gradient of attention could be had faster, by matrix products"
        if facts.device_type == "cuda":
            key, message = "train.deterministic", "attention could repeat its bits faster, by cuDNN"
        found.append(Finding("note", key, f"{message} ({facts.slow_attention})"))
    if facts.large_loss:
        message = "the loss could be computed in less time and memory by kernels of its own "
        message += f"({facts.large_loss}); what is compiled has the like"
        found.append(Finding("note", "train.compile", message))
    if facts.slow_layers:
        message = f"layers could be computed faster, by kernels of its own ({facts.slow_layers})"
        found.append(Finding("note", "train.fused_layers", message))
    return found


def _unfused(config: Config, device_type: str) -> Finding:
    """For attention that writes the scores of all pairs of tokens to memory."""
    told = (
        f"attention is computed by plain operators (math), with {config.model.context} x "
        f"{config.model.context} scores a head in memory"
    )
    if config.model.dropout and device_type == "cpu":
        return Finding("warning", "model.dropout", f"{told}: the fused kernel of a CPU has no dropout, set 0")
    size = config.model.width // config.model.heads
    message = f"{told}: no fused kernel of this device takes heads of {size} ({config.model.width} / "
    message += f"{config.model.heads}); 64 and 128 are usual"
    return Finding("warning", "model.heads", message)


def _settings(config: Config, facts: Facts) -> list[Finding]:
    found = []
    threads = config.train.threads
    if threads is not None and threads * facts.ranks_here > facts.cores:
        message = (
            f"{threads} threads of each of {facts.ranks_here} rank(s) here, on {facts.cores} cores, wait "
        )
        message += f"for each other: {max(1, facts.cores // facts.ranks_here)} a rank would not"
        found.append(Finding("warning", "train.threads", message))
    of_its_own = config.train.init_from is None  # weights that are there have a vocabulary
    if config.model.vocab_size % 64 and facts.device_type == "cuda" and of_its_own:
        up = -(-config.model.vocab_size // 64) * 64
        message = (
            f"{config.model.vocab_size} is no multiple of 64, which slows the largest product: take {up}"
        )
        found.append(Finding("warning", "model.vocab_size", message))
    usual = 0.003239 - 0.0001395 * math.log(parameter_count(config.model))  # Kaplan et al. 2020, eq. D.1
    if usual > 0 and config.optim.learning_rate > 3 * usual:
        message = f"{config.optim.learning_rate:g} is {config.optim.learning_rate / usual:.0f} times what is "
        message += f"usual for {parameter_count(config.model) / 1e6:.1f} M parameters ({usual:.1e})"
        found.append(Finding("warning", "optim.learning_rate", message))
    if not config.optim.warmup_steps and config.train.steps > 100:
        message = "no warm-up: the first steps of AdamW are its least certain ones"
        found.append(Finding("note", "optim.warmup_steps", message))
    if not config.validation.every:
        message = "nothing is held out to measure on: overfitting goes unseen"
        found.append(Finding("note", "validation.every", message))
    if facts.not_compiled:
        message = (
            f"it fails here ({facts.not_compiled}), so the run would go on without it, as these steps did: "
            "mend the compiler, or turn it off"
        )
        found.append(Finding("warning", "train.compile", message))
    enough = threads is None or threads * facts.ranks_here <= facts.cores
    if facts.device_type == "cpu" and enough and (crowded := facts.short_of_cores()):
        found.append(Finding("warning", "resources.cpu", crowded))
    long_run = config.train.steps * facts.step_seconds > 3600
    if long_run and not config.train.compile and facts.device_type == "cuda":
        message = "off; on a run of hours the minute that it takes comes back"
        found.append(Finding("note", "train.compile", message))
    return found
