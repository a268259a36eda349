"""The dashboard of one job: what it does now, what interruptions cost it, and what holds it back."""

from __future__ import annotations

from .panels import WINDOW, Panel, choice, dashboard, figure, graph, marks
from .queries import TRAINER, in_namespace, jobs, mean, of_job, one, step_share, trainer

DATA_WAIT_GOAL = 0.05
"""The share of time that a step may wait for data."""


def job() -> Panel:
    about = "One training job: loss and speed, checkpoints, what interruptions cost, and what holds it back."
    return dashboard(
        "holdfast-job",
        "Holdfast / Job",
        about,
        [*_standing(), *_training(), *_time(), *_saving(), *_account()],
        variables=[
            choice("namespace", "Namespace", f"group by (namespace) ({jobs('holdfast_job_attempts_total')})"),
            choice("job", "Job", f"group by (job) ({in_namespace('holdfast_job_attempts_total')})"),
        ],
        annotations=[
            marks("Attempts", _rose("holdfast_job_attempts_total"), "blue", "a new attempt"),
            marks("Disruptions", _rose("holdfast_job_disruptions_total"), "orange", "a disruption"),
            marks("Failures", _rose("holdfast_job_failures_total"), "red", "a failure"),
        ],
    )


def _rose(series: str) -> str:
    # Not `changes`: a job that takes a deleted one's name begins at nought, and had no disruption yet.
    return f"{one(series, 'increase({}[1m])')} > 0"


def _standing() -> list[Panel]:
    # What is left is not rounded away; and of steps without an end, NaN or none, no share is done.
    step, total = (f"max({trainer(f'holdfast_{name}')})" for name in ("step", "total_steps"))
    done = f"floor(100 * {step} / ({total} > 0)) / 100"
    attempts, lost = one("holdfast_job_attempts_total"), one("holdfast_job_lost_steps")
    return [
        figure(
            "Phase",
            "Where the job stands.",
            f"max by (phase) ({of_job('holdfast_job_phase')})",
            legend="{{phase}}",
            width=3,
        ),
        figure("Step", "Optimizer steps done.", one("holdfast_job_step"), width=3),
        figure("Done", "Steps done / steps to do.", done, unit="percentunit", width=3, decimals=0),
        figure("Attempts", "Gang starts of the job.", attempts, width=3),
        figure(
            "Disruptions", "Attempts that the platform ended.", one("holdfast_job_disruptions_total"), width=3
        ),
        figure("Failures", "Attempts that the job ended.", one("holdfast_job_failures_total"), width=3),
        figure("Lost steps", "Done, not durable when an attempt ended, done again.", lost, width=3),
        figure(
            "Goodput",
            "Time on steps that count / wall time since the job first ran.",
            one("holdfast_job_goodput_ratio"),
            unit="percentunit",
            width=3,
            decimals=1,
        ),
        figure(
            "What holds it back",
            "The trainer's own verdict on its newest half minute or so; `holdfast describe` has its figures.",
            advice(),
            legend="{{advice}}",
            width=24,
        ),
    ]


ADVICE = {
    "validation": "Validation takes much of the time: less often (validation.every), fewer batches.",
    "data computing": "Steps wait for a loader that computes: do it beforehand, or with more workers, cores.",
    "data reading": "Steps wait for a loader that reads: a local or faster disk, or read further ahead.",
    "data": "Steps wait for data: tokenise beforehand, put it on a local disk, or give the loader workers.",
    "checkpoint": "Saves hold the steps up: save less often (checkpoint.every), or use faster storage.",
    "other": "Time goes outside of every span: Python between the parts, or a peer that is waited for.",
    "no core": "The job's threads wait for cores: let less run beside it, or give it more (resources.cpu).",
    "shared gpu": "Others compute on the GPU too: let less run beside it, or give it one of its own.",
    "optimizer": "The optimizer takes much of a step: a larger train.global_batch, fused kernels.",
    "communication": "The exchange of gradients holds it back: accumulate (DDP), or take a faster network.",
    "device idle": "The device has time to spare: raise train.micro_batch, then try train.compile.",
    "compute": "Nothing holds the steps up: the time goes into computing.",
    "unknown": "The parts of a step are not told: put them into run.span(...).",
}
"""What to change, by the cause that the trainer names; `holdfast describe` has it with figures."""


def advice() -> str:
    """The trainer's newest verdict, as a series that says in its label what to change."""
    said = [
        f"""label_replace(max({trainer("holdfast_bottleneck", f'cause="{cause}"')}) == 1, """
        f'"advice", "{text}", "", "")'
        for cause, text in ADVICE.items()
    ]
    # max() left no labels on any, so an empty `on` lets the one that is there win.
    return " or on () ".join(said)


def _training() -> list[Panel]:
    loss = [
        (f"max({trainer('holdfast_loss')})", "of the step"),
        (f"max({trainer('holdfast_loss_smoothed')})", "smoothed"),
        (f"max({trainer('holdfast_validation_loss')})", "validation"),
    ]
    gpu, cpu = (trainer("holdfast_utilization_ratio", f'of="{of}"') for of in ("gpu", "cpu"))
    return [
        graph("Loss", "Mean over ranks.", loss, lowest=None, width=6),
        graph(
            "Gradient norm",
            "Before clipping, where the loop tells it.",
            [(f"max({trainer('holdfast_grad_norm')})", "norm")],
            width=6,
        ),
        graph(
            "Tokens per second",
            "Of all ranks, over the last steps.",
            [(f"max({trainer('holdfast_tokens_per_second')})", "tokens/s")],
            width=6,
        ),
        graph(
            "MFU and utilisation",
            "MFU: the model's FLOP/s as a share of the matrix-product peak that was measured at the start. "
            "GPU: share of time in which a kernel ran on rank 0's, anybody's. CPU: what rank 0 used of its "
            "cores.",
            [
                (f"max({trainer('holdfast_mfu_ratio')})", "MFU"),
                (f"max({gpu})", "GPU"),
                (f"max({cpu})", "CPU"),
            ],
            unit="percentunit",
            width=6,
        ),
    ]


def _time() -> list[Panel]:
    spans = f"rate({trainer('holdfast_step_span_seconds_sum')}[{WINDOW}])"
    steps = f"rate({trainer('holdfast_step_seconds_count')}[{WINDOW}])"
    breakdown = f"max by (phase) ({spans} / ignoring(phase) group_left () {steps})"
    return [
        graph(
            "A step's time",
            "Seconds of a step by phase, rank 0.",
            [(breakdown, "{{phase}}")],
            unit="s",
            stacked=True,
            width=6,
        ),
        graph(
            "Wait for data",
            "Share of the steps' time; the goal is to stay below 5 %.",
            [(f"max({step_share('data', TRAINER, WINDOW)})", "waiting")],
            unit="percentunit",
            goal=DATA_WAIT_GOAL,
            width=6,
        ),
        graph(
            "Memory",
            "The most that rank 0 took: tensors of a GPU, else resident.",
            [(f"max({trainer('holdfast_memory_peak_bytes')})", "peak")],
            unit="bytes",
            width=6,
        ),
        graph(
            "GPU, by replica and rank",
            "Share of the SMs' time that the job's own processes had, as NVML samples it.",
            [
                (
                    f"max by (replica, rank, uuid) ({of_job('holdfast_gpu_process_sm_ratio')})",
                    "replica {{replica}} rank {{rank}}",
                )
            ],
            unit="percentunit",
            highest=1,
            width=6,
        ),
    ]


def _saving() -> list[Panel]:
    unsaved = f"max({trainer('holdfast_step')} - {trainer('holdfast_durable_step')})"
    saves = [
        (f"max({trainer('holdfast_checkpoint_newest_seconds')})", "until durable"),
        (f"max({mean(trainer('holdfast_checkpoint_stall_seconds'), '5m')})", "training held up"),
        (f"max({trainer('holdfast_notice_seconds')})", "what a notice leaves"),
    ]
    return [
        graph(
            "Unsaved steps",
            "Steps that would be done again if every replica vanished now.",
            [(unsaved, "steps")],
            width=6,
        ),
        graph(
            "A save",
            "The newest save, beside the time that a notice leaves for one.",
            saves,
            unit="s",
            width=6,
        ),
        graph(
            "Checkpoint size",
            "Of the newest checkpoint, all ranks.",
            [(f"max({trainer('holdfast_checkpoint_bytes')})", "bytes")],
            unit="bytes",
            width=6,
        ),
        graph(
            "Failed saves and skipped steps",
            "Saves that failed, while training went on, and fp16 steps that overflowed, in this attempt.",
            [
                (f"max({trainer('holdfast_checkpoint_failures_total')})", "failed saves"),
                (f"max({trainer('holdfast_skipped_steps_total')})", "skipped steps"),
            ],
            width=6,
        ),
    ]


def _account() -> list[Panel]:
    incidents = [
        (one("holdfast_job_disruptions_total"), "disruptions"),
        (one("holdfast_job_failures_total"), "failures"),
        (one("holdfast_job_attempts_total"), "attempts"),
    ]
    return [
        graph("Attempts and incidents", "Since the job was submitted.", incidents, width=6),
        graph("Lost work", "Steps done again.", [(one("holdfast_job_lost_steps"), "steps")], width=6),
        graph(
            "Recovery",
            "The newest: from the last sign of life to the first step of the next attempt, by stages.",
            [
                (one("holdfast_job_recovery_seconds"), "recovery"),
                (f"max by (stage) ({of_job('holdfast_job_recovery_stage_seconds')})", "{{stage}}"),
            ],
            unit="s",
            width=6,
        ),
        graph(
            "Goodput",
            "Time on steps that count / wall time since the job first ran.",
            [(one("holdfast_job_goodput_ratio"), "goodput")],
            unit="percentunit",
            highest=1,
            width=6,
        ),
    ]
