"""What a run tells of itself: rates, MFU, Prometheus series, progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .checkpoint import Saved
from .contract import Progress
from .pace import Newest, Pace, Work
from .sizes import loss_text, rate_text, share_text
from .verdict import CAUSES, Verdict

LOSS_DECAY = 0.98
"""Of the smoothed loss: a loss counts so much less than the one after it."""
WINDOW = 20
"""Steps that rates are taken over, an attempt's first left out."""
RATES = (
    "tokens_per_second", "samples_per_second", "data_wait_fraction", "mfu", "gpu_utilization",
    "cpu_utilization", "eta_seconds",
)  # fmt: skip
"""Of `Progress`, what it says of the present by the newest steps."""
_NO_RATES: dict[str, Any] = dict.fromkeys(RATES)
_SPAN_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SAVE_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class StepFigures:
    """What all ranks worked on in a step, and the time that went."""

    wall_seconds: float
    """From the end of the step before: also what a save in between held up."""
    tokens: int
    samples: int


class Telemetry:
    """Rates over the last steps, Prometheus series and the progress document of one attempt.

    Every rank keeps one (the arithmetic is nothing); rank 0's is served.
    """

    def __init__(self, attempt: int, world_size: int) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()  # the saver's thread tells too
        self._world_size = world_size
        self._walls = Newest[float](WINDOW)
        self._pace = Pace(WINDOW)
        self._recent = Work(WINDOW)
        self._waits = Newest[tuple[float, float | None]](WINDOW)
        """Wall seconds of a step, and those of them that waited for data, where the loop tells them."""
        self._flops_per_token: float | None = None
        self._peak: float | None = None
        self.progress = Progress(
            attempt=attempt,
            step=0,
            total_steps=None,
            durable_step=0,
            phase="starting",
            world_size=world_size,
            checkpoints=0,
            updated=time.time(),
        )
        self._spent = self._spent_durably = 0.0
        """On steps of this attempt, and on those up to its newest durable one."""
        self._when_saved: dict[int, float] = {}
        """The same up to the steps that are being saved."""
        r = self.registry
        self._step = Gauge("holdfast_step", "Optimizer steps done.", registry=r)
        self._total = Gauge("holdfast_total_steps", "Steps this run is to do.", registry=r)
        self._durable = Gauge(
            "holdfast_durable_step", "Newest step covered by a durable checkpoint.", registry=r
        )
        self._attempt = Gauge("holdfast_attempt", "Number of this attempt.", registry=r)
        self._attempt.set(attempt)
        self._loss = Gauge("holdfast_loss", "Training loss of the newest step, mean over ranks.", registry=r)
        self._loss_ema = Gauge(
            "holdfast_loss_smoothed", f"Exponential mean of the losses, decay {LOSS_DECAY}.", registry=r
        )
        self._ema = self._ema_weight = 0.0
        self._loss_step: int | None = None
        self._bottleneck = Gauge(
            "holdfast_bottleneck",
            "1 for what held rank 0 back over the newest interval; no series before the first verdict.",
            ["cause"],
            registry=r,
        )
        self._attention = Gauge(
            "holdfast_attention_info",
            "1 for the kernel that attention takes, rank 0.",
            ["kernel"],
            registry=r,
        )
        self._val_loss = Gauge("holdfast_validation_loss", "Newest validation loss.", registry=r)
        self._grad_norm = Gauge("holdfast_grad_norm", "Gradient norm before clipping.", registry=r)
        self._tokens_rate = Gauge(
            "holdfast_tokens_per_second",
            f"Of all ranks, over the last {WINDOW} steps, without the first of an attempt.",
            registry=r,
        )
        self._tokens = Counter("holdfast_tokens", "Tokens trained on in this attempt, all ranks.", registry=r)
        self._mfu = Gauge(
            "holdfast_mfu_ratio",
            "Model FLOP/s as a share of the matrix-product peak measured on this device at start.",
            registry=r,
        )
        self._memory = Gauge(
            "holdfast_memory_peak_bytes",
            "Most that rank 0 took: tensors of a GPU, else resident.",
            registry=r,
        )
        self._utilization = Gauge(
            "holdfast_utilization_ratio",
            "Over the newest second or two. gpu: share of time in which a kernel ran on rank 0's GPU, "
            "anybody's. cpu: share of the cores that rank 0's process may compute on which it used.",
            ["of"],
            registry=r,
        )
        self._epoch = Gauge("holdfast_epoch", "How often the run went through its data.", registry=r)
        self.steps_an_epoch: float | None = None
        """None: not known."""
        self._span = Histogram(
            "holdfast_step_span_seconds",
            "Seconds of a step by phase, rank 0.",
            ["phase"],
            buckets=_SPAN_BUCKETS,
            registry=r,
        )
        self._seconds = Histogram(
            "holdfast_step_seconds", "Seconds of a whole step.", buckets=_SPAN_BUCKETS, registry=r
        )
        self._save_seconds = Histogram(
            "holdfast_checkpoint_seconds",
            "From the start of a save until it is durable.",
            buckets=_SAVE_BUCKETS,
            registry=r,
        )
        self._stall = Histogram(
            "holdfast_checkpoint_stall_seconds",
            "What a save held up the training thread.",
            buckets=_SAVE_BUCKETS,
            registry=r,
        )
        self._save_bytes = Gauge("holdfast_checkpoint_bytes", "Size of the newest checkpoint.", registry=r)
        self._saved_at = Gauge(
            "holdfast_checkpoint_timestamp_seconds",
            "When the newest checkpoint of this attempt became durable, seconds since the epoch.",
            registry=r,
        )
        self._newest_save = Gauge(
            "holdfast_checkpoint_newest_seconds",
            "What the newest save took, from its start until it was durable.",
            registry=r,
        )
        self._skipped = Counter(
            "holdfast_skipped_steps", "Steps passed over, as gradients in fp16 overflowed.", registry=r
        )
        self._notice = Gauge("holdfast_notice_seconds", "What a notice leaves for a last save.", registry=r)
        self._save_failures = Counter("holdfast_checkpoint_failures", "Saves that failed.", registry=r)
        for gauge in (
            self._step,
            self._total,
            self._durable,
            self._loss,
            self._loss_ema,
            self._val_loss,
            self._grad_norm,
            self._tokens_rate,
            self._mfu,
            self._memory,
            self._epoch,
            self._save_bytes,
            self._saved_at,
            self._newest_save,
            self._notice,
        ):
            gauge.set(float("nan"))  # not known yet: a gauge that was never set would say 0

    @property
    def unsaved_seconds(self) -> float:
        """Of work since the newest durable checkpoint, also where nobody knows what attempts before took."""
        return self._spent - self._spent_durably

    def resumed(self, step: int, useful_seconds: float | None, startup: Mapping[str, float]) -> None:
        """This attempt goes on from `step`, which all attempts together spent so many seconds on; `startup`
        are the contract's figures of how it got here."""
        self._update(
            **startup,
            step=step,
            durable_step=step,
            resumed_step=step,
            resumed_seconds=useful_seconds,
            useful_seconds=useful_seconds,
            durable_seconds=useful_seconds,
        )

    def _with_earlier(self, spent: float) -> float | None:
        """So many seconds of this attempt and those of the attempts before it, where these are known."""
        earlier = self.progress.resumed_seconds
        return None if earlier is None else earlier + spent

    def attention(self, kernel: str) -> None:
        """What scaled-dot-product attention takes; empty where nobody looked, or there is none."""
        if kernel:
            self._attention.labels(kernel).set(1)
            self._update(attention=kernel)

    def begin(
        self,
        step: int,
        total_steps: int,
        durable_step: int,
        flops_per_token: float | None,
        peak: float | None,
    ) -> None:
        """Training starts at `step`; `peak` is one rank's FLOP/s."""
        self._flops_per_token, self._peak = flops_per_token, peak
        self._step.set(step)
        self._total.set(total_steps)
        self._durable.set(durable_step)
        self._update(step=step, total_steps=total_steps, durable_step=durable_step, phase="training")

    def nothing_left(self, total_steps: int) -> None:
        """All of so many steps were done before this attempt."""
        self._total.set(total_steps)
        self._update(total_steps=total_steps, eta_seconds=0.0)

    def phase(self, phase: str) -> None:
        """What the run does now: starting, training, validating, saving, stopping, finished."""
        self._update(phase=phase)

    def step(self, step: int, seconds: float, wall_seconds: float) -> None:
        """A step was done, which took so long on this rank; `wall_seconds` from the end of the one before."""
        self._walls.add(wall_seconds)
        self._step.set(step)
        self._seconds.observe(seconds)
        self._spent += seconds
        per_step = sum(self._walls) / len(self._walls)
        if self.progress.first_step is None:
            self._update(first_step=step, first_step_time=time.time())
        epoch = step / self.steps_an_epoch if self.steps_an_epoch else None
        if epoch is not None:
            self._epoch.set(epoch)
        self._update(
            step=step,
            phase="training",
            step_seconds=per_step,
            epoch=epoch,
            useful_seconds=self._with_earlier(self._spent),
        )

    def worked(self, figures: StepFigures) -> None:
        """What a step did, all ranks together, once that is known."""
        self._recent.add(figures.wall_seconds, figures.tokens, figures.samples)
        tokens, samples = self._recent.a_second()
        mfu = self.mfu(tokens)
        self._tokens.inc(figures.tokens)
        self._tokens_rate.set(tokens or float("nan"))
        self._mfu.set(float("nan") if mfu is None else mfu)
        self._update(
            tokens_per_second=tokens or None,
            samples_per_second=samples or None,
            mfu=mfu,
        )

    def mfu(self, tokens_per_second: float) -> float | None:
        """The model's FLOP/s at that rate, of all ranks, as a share of their peak; None: not known."""
        if not (self._flops_per_token and self._peak and tokens_per_second):
            return None
        return tokens_per_second * self._flops_per_token / (self._peak * self._world_size)

    def memory(self, peak: int) -> None:
        """Bytes that this rank took at most so far."""
        self._memory.set(peak)
        self._update(memory_bytes=peak)

    def utilization(self, of: Literal["cpu", "gpu"], share: float | None) -> None:
        """Of what rank 0 computes on, over the newest interval; None: not known."""
        if share is not None:
            self._utilization.labels(of).set(share)
        else:
            self._utilization.clear()  # an old figure would be taken for a new one
        self._update(**{f"{of}_utilization": share})

    def without_rates(self) -> Progress:
        """What is true of a run whose newest steps are long ago; they are told again with the next step."""
        return replace(self.progress, **_NO_RATES)

    def forget_rates(self) -> None:
        """No series has a speed until there is a step again: the newest steps are long ago."""
        for gauge in (self._tokens_rate, self._mfu):
            gauge.set(float("nan"))
        self._utilization.clear()

    def timed(self, wall_seconds: float, spans: Mapping[str, float]) -> None:
        """The parts of a step that took `wall_seconds`, as they become known: on a GPU a step late."""
        for phase, seconds in spans.items():
            self._span.labels(phase).observe(seconds)
        self._waits.add((wall_seconds, spans.get("data")))
        waits = [data for _, data in self._waits if data is not None]
        elapsed = sum(wall for wall, _ in self._waits)
        self._pace.add(wall_seconds, spans)
        total, step = self.progress.total_steps, self.progress.step
        self._update(
            data_wait_fraction=sum(waits) / elapsed if waits else None,
            eta_seconds=None if total is None else self._pace.seconds_a_step() * (total - step),
        )

    def count(self, step: int) -> None:
        """A step was done, of which nothing else is told."""
        self._step.set(step)
        self._update(step=step, phase="training")

    def loss(self, value: float, step: int | None = None) -> None:
        """Of step number `step`, which may not be the newest that was done."""
        self._loss.set(value)
        self._loss_step = step
        # The weights so far sum to 1 - decay^n: dividing by that takes the bias of the beginning out.
        self._ema = LOSS_DECAY * self._ema + (1 - LOSS_DECAY) * value
        self._ema_weight = LOSS_DECAY * self._ema_weight + (1 - LOSS_DECAY)
        smoothed = self._ema / self._ema_weight
        self._loss_ema.set(smoothed)
        self._update(loss=value, loss_ema=smoothed)

    def verdict(self, verdict: Verdict) -> None:
        """What holds the run back, over the newest interval."""
        for cause in CAUSES:
            self._bottleneck.labels(cause).set(cause == verdict.cause)
        self._update(verdict=verdict.sentence)

    def val_loss(self, value: float) -> None:
        self._val_loss.set(value)
        self._update(val_loss=value)

    def grad_norm(self, value: float) -> None:
        self._grad_norm.set(value)
        self._update(grad_norm=value)

    def skipped(self) -> None:
        """A gradient scaler passed a step over."""
        self._skipped.inc()

    def saving(self, step: int) -> None:
        """A save of the state after `step` steps begins."""
        self._when_saved[step] = self._spent

    def saved(self, saved: Saved, notice_seconds: float | None = None) -> None:
        """A checkpoint became durable, and a notice would leave `notice_seconds` for one (None: a notice is
        running out already). Called from the saver's thread."""
        self._saved_at.set_to_current_time()
        self._newest_save.set(saved.seconds)
        if notice_seconds is not None:
            self._notice.set(notice_seconds)
        self._durable.set(saved.step)
        self._save_seconds.observe(saved.seconds)
        self._stall.observe(saved.stall_seconds)
        self._save_bytes.set(saved.bytes)
        spent = self._when_saved.pop(saved.step, None)
        self._spent_durably = max(self._spent_durably, spent or 0.0)
        self._update(
            durable_step=saved.step,
            durable_seconds=None if spent is None else self._with_earlier(spent),
            checkpoints=(self.progress.checkpoints or 0) + 1,
            digest=saved.digest,
            save_fault=None,
        )

    def save_failed(self, step: int, why: str) -> None:
        """`step` did not become durable; or it did, and older ones could not be removed."""
        self._save_failures.inc()
        if step > self.progress.durable_step:
            self._update(save_fault=why)

    def summary(self) -> str:
        """Loss, rates and time left in a line, as far as they are known."""
        now = self.progress
        of = "" if self._loss_step is None else f" of step {self._loss_step}"
        parts = [f"loss {loss_text(now.loss)}{of}"] if now.loss is not None else []
        if now.step_seconds is not None:
            parts.append(f"{1e3 * now.step_seconds:,.1f} ms a step")
        if now.tokens_per_second is not None:
            parts.append(f"{now.tokens_per_second:,.0f} tokens/s")
        if now.samples_per_second is not None:
            parts.append(f"{rate_text(now.samples_per_second)} samples/s")
        if now.mfu is not None:
            parts.append(f"MFU {share_text(now.mfu)}")
        for name, share in (("GPU", now.gpu_utilization), ("CPU", now.cpu_utilization)):
            if share is not None:
                parts.append(f"{name} {share_text(share)} busy")
        if now.memory_bytes is not None:
            parts.append(f"{now.memory_bytes / 1e9:.2f} GB")
        if now.epoch is not None:
            parts.append(f"epoch {now.epoch:.2f}")
        if now.eta_seconds is not None:
            parts.append(f"{now.eta_seconds:.0f} s left")
        return ", ".join(parts) or "no figures yet"

    def _update(self, **changes: object) -> None:
        with self._lock:
            self.progress = replace(self.progress, updated=time.time(), **changes)  # type: ignore[arg-type]
