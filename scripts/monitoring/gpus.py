"""The dashboard of a cluster's GPUs: which are used, how well, by whom, and what that costs."""

from __future__ import annotations

from .panels import WINDOW, Panel, dashboard, figure, graph, table, text_box
from .queries import own

UTILIZATION_GOAL = 0.85

HELD = "(sum by (uuid) (holdfast_gpu_shares_allocated) > 0 or sum by (uuid) (holdfast_gpu_processes) > 0)"
"""GPUs of which a pod holds a share, or on which a job's processes are (on one machine, without pods)."""
BUSY = "(max by (uuid) (holdfast_gpu_utilization_ratio))"
"""How busy each is; of one that is cut by MIG, and of some cards, NVML does not say it."""
READ = "(max by (uuid) (holdfast_gpu_up) == 1)"
SILENT = 'holdfast_gpu_exporter_up{source="pod-resources"} == 0'
UNTOLD = f"(max by (uuid) (holdfast_gpu_up and on (instance) ({SILENT})) == 1)"
"""Those of nodes whose kubelet does not say who holds them."""
NONE = "0 * count(holdfast_gpu_up)"
"""How many there are where GPUs are told of and none is as asked. Where none is told of, nobody knows."""
UNREAD = f"count(max by (uuid, gpu, instance) (holdfast_gpu_up) == 0) or {NONE}"
"""By their place too: a GPU that was lost before the exporter began never told its UUID."""
IDLE_BELOW = 0.05
COMPUTES = f"({BUSY} >= {IDLE_BELOW})"
HOLDERS = ("namespace", "job", "pod")


def gpus() -> Panel:
    return dashboard(
        "holdfast-gpus",
        "Holdfast / GPUs",
        "Every GPU: free or held, busy or idle, its memory, power and errors, and who uses it.",
        [*_now(), *_device(), *_work(), *_health(), *_holders()],
        variables=[text_box("price", "Price of a GPU hour", "1")],
        span="now-24h",
    )


def _now() -> list[Panel]:
    return [
        figure("GPUs", "That can be read.", "sum(max by (uuid) (holdfast_gpu_up))", width=3),
        figure("Held", "By a pod or a job.", f"count({HELD}) or {NONE}", width=3),
        figure(
            "Held and idle",
            "Busy for less than 5 % of the last 15 minutes.",
            f"count(({busy_over('15m')} < {IDLE_BELOW}) and on (uuid) {HELD}) or {NONE}",
            width=3,
        ),
        figure(
            "Cannot be read",
            "Fell off the bus, or the driver does not answer for it.",
            UNREAD,
            width=3,
        ),
        figure(
            "Busy while held",
            "Share of time in which some kernel ran; the goal is 85 %.",
            f"avg({BUSY} and on (uuid) {HELD})",
            unit="percentunit",
            width=3,
            decimals=0,
        ),
        figure(
            "Power", "Of all GPUs.", "sum(max by (uuid) (holdfast_gpu_power_watts))", unit="watt", width=3
        ),
        figure(
            "GPU hours",
            "Held, in the time shown.",
            _hours(),
            width=3,
            decimals=2,
        ),
        figure("Cost", "GPU hours x the price above.", f"({_hours()}) * $price", width=3, decimals=2),
    ]


def busy_over(window: str) -> str:
    """How busy each was in a window: of all samples, for an exporter that starts anew in it is another
    instance, whose mean is that of a part."""
    samples, number = (
        f"sum by (uuid) ({of}_over_time(holdfast_gpu_utilization_ratio[{window}]))" for of in ("sum", "count")
    )
    return f"({samples} / {number})"


def _hours() -> str:
    """Mean number of GPUs held x hours. A GPU held in part is held: nobody else can have it whole."""
    return f"sum_over_time((count({HELD}) or {NONE})[$__range:1m]) / 60"


def _device() -> list[Panel]:
    return [
        graph(
            "GPUs by state",
            "Held and busy, held and idle, free, not to be read, not known (held while NVML does not say how "
            "busy, as where MIG cuts it, or at rest while the kubelet does not say who holds it), and busy "
            "though no pod and no process of it is seen.",
            [
                (f"count({COMPUTES} and on (uuid) {HELD}) or {NONE}", "busy"),
                (f"count(({BUSY} < {IDLE_BELOW}) and on (uuid) {HELD}) or {NONE}", "held, idle"),
                (f"count({READ} unless on (uuid) ({HELD} or {COMPUTES} or {UNTOLD})) or {NONE}", "free"),
                (UNREAD, "cannot be read"),
                (
                    f"count(({READ} and on (uuid) {HELD} unless on (uuid) {BUSY})"
                    f" or ({UNTOLD} unless on (uuid) ({HELD} or {COMPUTES}))) or {NONE}",
                    "not known",
                ),
                (f"count({COMPUTES} unless on (uuid) {HELD}) or {NONE}", "busy, nobody seen"),
            ],
            stacked=True,
        ),
        graph(
            "Utilisation",
            "Share of time in which at least one kernel ran, by GPU; the line is the goal while it is held.",
            [("max by (gpu, uuid, instance) (holdfast_gpu_utilization_ratio)", "{{instance}} gpu {{gpu}}")],
            unit="percentunit",
            goal=UTILIZATION_GOAL,
            highest=1,
        ),
        graph(
            "Memory",
            "Share in use, by GPU.",
            [
                (
                    "max by (gpu, uuid, instance) (holdfast_gpu_memory_used_bytes"
                    " / holdfast_gpu_memory_total_bytes)",
                    "{{instance}} gpu {{gpu}}",
                )
            ],
            unit="percentunit",
            highest=1,
        ),
    ]


def _work() -> list[Panel]:
    """What the hardware itself counts, from Hopper on: a GPU that is busy all the time can do little."""

    def rate(counter: str) -> str:
        return f"max by (gpu, uuid, instance) (rate(holdfast_gpu_{counter}_total[{WINDOW}]))"

    named = "{{instance}} gpu {{gpu}}"
    return [
        graph(
            "SMs and tensor cores",
            "Share of time in which they had work, mean of all SMs. From Hopper on.",
            [(rate("sm_active_seconds"), f"{named} SMs"), (rate("tensor_active_seconds"), f"{named} tensor")],
            unit="percentunit",
            highest=1,
        ),
        graph(
            "Memory bandwidth",
            "Share of what the GPU's memory can move. From Hopper on.",
            [(rate("dram_active_seconds"), named)],
            unit="percentunit",
            highest=1,
        ),
        graph(
            "PCIe and NVLink",
            "By GPU, to it and from it. NVLink: all its links.",
            [
                (rate(f"{link}_{way}_bytes"), f"{named} {name} {way}")
                for link, name in (("pcie", "PCIe"), ("nvlink", "NVLink"))
                for way in ("sent", "received")
            ],
            unit="binBps",
        ),
    ]


def _health() -> list[Panel]:
    named = "{{instance}} gpu {{gpu}}"
    return [
        graph(
            "Power",
            "By GPU.",
            [("max by (gpu, uuid, instance) (holdfast_gpu_power_watts)", named)],
            unit="watt",
            width=6,
        ),
        graph(
            "Temperature",
            "Of the chip.",
            [("max by (gpu, uuid, instance) (holdfast_gpu_temperature_celsius)", named)],
            unit="celsius",
            width=6,
        ),
        graph(
            "Clocks held down",
            "1 where the GPU is slowed for this reason, idleness left out.",
            [
                (
                    'max by (gpu, uuid, instance, reason) (holdfast_gpu_slowed{reason!="idle"} > 0)',
                    f"{named} {{{{reason}}}}",
                )
            ],
            width=6,
        ),
        graph(
            "Xid and ECC errors",
            "In the last hour.",
            [
                ("sum(round(increase(holdfast_gpu_xid_errors_total[1h])))", "Xid"),
                ("sum(round(increase(holdfast_gpu_ecc_uncorrected_errors_total[1h])))", "ECC, not corrected"),
            ],
            width=6,
        ),
    ]


def _holders() -> list[Panel]:
    def by_holder(series: str) -> str:
        # Who is no training job has no `job`, and must not be called as the scrape is.
        others = f'label_replace({series}{{attempt=""}}, "job", "", "", "")'
        jobs = own(f'{series}{{attempt!=""}}', "job")
        both = own(f"{jobs} or {others}", "namespace", "pod")
        return f"sum by ({', '.join(HOLDERS)}) ({both})"

    who = 'holdfast_gpu_shares_allocated{attempt!=""}'
    jobs = f"sum by (namespace, job) ({own(who, 'namespace', 'job')})"
    return [
        table(
            "Who uses what",
            "Shares held, and the figures of the holder's own processes where NVML gives them.",
            [
                (by_holder("holdfast_gpu_shares_allocated"), "shares"),
                (by_holder("holdfast_gpu_processes"), "processes"),
                (by_holder("holdfast_gpu_process_memory_bytes"), "memory, bytes"),
                (by_holder("holdfast_gpu_process_sm_ratio"), "SM time, GPUs"),
            ],
            width=16,
        ),
        graph("Shares by job", "Of training jobs.", [(jobs, "{{namespace}}/{{job}}")], stacked=True),
        graph(
            "Exporter: what answers",
            "1 while a source of figures answers.",
            [("min by (source, instance) (holdfast_gpu_exporter_up)", "{{instance}} {{source}}")],
            highest=1,
            width=12,
        ),
        graph(
            "Exporter: time of a reading",
            "What NVML took to answer.",
            [("max by (instance) (holdfast_gpu_exporter_read_seconds)", "{{instance}}")],
            unit="s",
            width=12,
        ),
    ]
