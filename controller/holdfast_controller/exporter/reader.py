"""The process that calls NVML: a line of JSON for each line on its standard input.

    -> {"id": 7}
    <- {"at": 0}                      GPU 0 comes next; so a hang can be told where it is
    <- {"id": 7, "reading": {...}, "xids": [[uuid, code]]}     or "fault": {"reason", "message"}

It ends with its standard input, even while a call hangs: that is watched by a thread of its own, and
ctypes lets go of the interpreter while NVML works. After a reload of the driver the library in memory
may be of the old release; a fresh process loads the new one, so a mismatch ends this one.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

from .nvml import Nvml, NvmlFault
from .readings import Reason


def main() -> None:
    # What a library prints must not land between the lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()

    def tell(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document, separators=(",", ":")) + "\n")

    nvml: Nvml | None = None
    while True:
        request = requests.get()
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            try:
                nvml = nvml or Nvml()
                answer["reading"] = nvml.read(lambda index: tell({"at": index}))
            except NvmlFault:
                # The driver may have been loaded again since: one fresh start before giving up.
                if nvml is None:
                    raise
                nvml.close()
                nvml = None
                nvml = Nvml()
                answer["reading"] = nvml.read()
            answer["xids"] = nvml.xids()
        except NvmlFault as fault:
            if nvml is not None:
                nvml.close()
                nvml = None
            answer["fault"] = {"reason": fault.reason, "message": str(fault)}
        tell(answer)
        if answer.get("fault", {}).get("reason") == Reason.DRIVER_MISMATCH:
            return


if __name__ == "__main__":
    main()
