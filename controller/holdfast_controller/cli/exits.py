"""Exit codes of `holdfast`; its --help tells them."""

ERROR = 1
USAGE = 2
JOB_FAILED = 3
TIMED_OUT = 4
INTERRUPTED = 130
PIPE_CLOSED = 141
