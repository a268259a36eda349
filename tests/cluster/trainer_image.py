"""An image whose `python` is a shell script that behaves as torchrun around our trainer does.

It counts steps (STEPS of them, PAUSE seconds each), serves /progress and /ledger, and on a notice says that
it saved, half a second before it ends: no trainer ends sooner, and with it the node removes its log. Where
ATTEMPTS says how many attempts share the steps, each goes no further than its part, so that a test which hits
it never comes too late. What is tested with it is all around the trainer; the trainer itself has its own
tests.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.cluster import images
from tests.cluster.oci import Image

NAME = "docker.io/holdfast/trainer-stand-in:1"

SCRIPT = r"""#!/bin/sh
say() {
  echo "{\"outcome\": \"$1\", \"step\": $step, \"durable_step\": $step, \"error\": \"$2\"}" \
    >/dev/termination-log
}
tell() {
  echo "{\"attempt\": $HOLDFAST_ATTEMPT, \"step\": $step, \"total_steps\": $STEPS," \
    "\"durable_step\": $step, \"phase\": \"$1\", \"updated\": $step}" >/tmp/www/new
  mv /tmp/www/new /tmp/www/progress
}
state=$HOLDFAST_RUN_DIR/step-$HOLDFAST_REPLICA
step=0
[ -f "$state" ] && step=$(cat "$state")
resumed=$step
stop() { echo "$step" >"$state"; say interrupted; echo "saved at step $step"; sleep 0.5; exit 1; }
trap stop TERM
mkdir -p /tmp/www
if [ "$HOLDFAST_REPLICA" = 0 ]; then
  echo "{\"event\": \"attempt_start\", \"time\": 1, \"attempt\": $HOLDFAST_ATTEMPT," \
    "\"resumed_step\": $resumed}" >>"$HOLDFAST_RUN_DIR/ledger"
  tell starting
  cp "$HOLDFAST_RUN_DIR/ledger" /tmp/www/ledger
  httpd -p "$HOLDFAST_PORT" -h /tmp/www
fi
echo "replica $HOLDFAST_REPLICA of attempt $HOLDFAST_ATTEMPT goes on at step $step"
while [ "$step" -lt "$STEPS" ]; do
  sleep "${PAUSE:-0.1}"
  [ "$HOLDFAST_ATTEMPT" -ge "${ATTEMPTS:-1}" ] ||
    [ "$step" -lt "$((STEPS * HOLDFAST_ATTEMPT / ATTEMPTS))" ] || continue
  step=$((step + 1))
  tell training
  if [ "$step" = "$FAIL_AT" ]; then say failed "ValueError: loss is nan"; exit 1; fi
done
say finished
echo "finished at step $step"
"""


def trainer_image(directory: Path) -> Image:
    """`directory` is where its script is written."""
    script = directory / "python"
    script.write_text(SCRIPT)
    base = images.busybox()
    return replace(base, name=NAME, files={**base.files, "bin/python": script})
