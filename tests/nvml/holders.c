/* Who holds a GPU and what befalls it: processes, MIG instances, Xid events. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nvml.h"
#include "script.h"

/* ------------------------------------------------------------------ processes: `pid:bytes:percent[:instance]` */

static Result processes(Device device, const char *kind, unsigned *n, Process *to) {
    Result result = enter(device, "processes");
    if (result) return result;
    const char *line = text("%d.%s", device->gpu, kind);
    unsigned room = *n, found = 0;
    char words[65536], *rest;
    snprintf(words, sizeof words, "%s", line ? line : "");
    for (char *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest), found++) {
        unsigned pid, percent, instance = 0xffffffff;
        long long bytes;
        if (sscanf(word, "%u:%lld:%u:%u", &pid, &bytes, &percent, &instance) < 3) return INVALID_ARGUMENT;
        if (to && found < room)
            to[found] = (Process){pid, bytes < 0 ? NOT_AVAILABLE : (unsigned long long)bytes, instance, instance};
    }
    *n = found;
    return found > room || (!to && found) ? INSUFFICIENT_SIZE : SUCCESS;
}
EXPORTED Result nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *n, Process *to) {
    return processes(device, "processes", n, to);
}
EXPORTED Result nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *n, Process *to) {
    return processes(device, "graphics", n, to);
}

static unsigned long long microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

EXPORTED Result nvmlDeviceGetProcessUtilization(Device device, Sample *to, unsigned *n, unsigned long long since) {
    Result result = enter(device, "process-utilization");
    if (result) return result;
    const char *line = text("%d.processes", device->gpu);
    double age = 0;
    unsigned long long time = microseconds();
    unsigned room = *n, found = 0;
    char words[65536], *rest;
    if (number("samples.age", &age)) time -= (unsigned long long)(age * 1e6);
    if (!line || time <= since) return NOT_FOUND;
    snprintf(words, sizeof words, "%s", line);
    for (char *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        unsigned pid, percent;
        long long bytes;
        /* As the real one: a process that did nothing has no sample. */
        if (sscanf(word, "%u:%lld:%u", &pid, &bytes, &percent) < 3 || !percent) continue;
        if (to && found < room) to[found] = (Sample){pid, time, percent, 0, 0, 0};
        found++;
    }
    *n = found;
    if (!found) return NOT_FOUND;
    return to && found <= room ? SUCCESS : INSUFFICIENT_SIZE;
}

/* ------------------------------------------------------------------ MIG */

EXPORTED Result nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    Result result = enter(device, "mig");
    *current = *pending = migs(device->gpu) > 0;
    return result ? result : text("%d.mig", device->gpu) || *current ? SUCCESS : NOT_SUPPORTED;
}
EXPORTED Result nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *n) {
    *n = MIGS - 1;
    return enter(device, "mig");
}
EXPORTED Result nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *mig) {
    if ((int)index >= migs(device->gpu)) return NOT_FOUND;
    *mig = handle(device->gpu, (int)index);
    return enter(device, "mig");
}
EXPORTED Result nvmlDeviceIsMigDeviceHandle(Device device, unsigned *is) {
    *is = device->mig >= 0;
    return SUCCESS;
}
EXPORTED Result nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device mig, Device *device) {
    *device = handle(mig->gpu, -1);
    return SUCCESS;
}
EXPORTED Result nvmlDeviceGetGpuInstanceId(Device device, unsigned *id) {
    return whole(device, "mig", "instance", id);
}
EXPORTED Result nvmlDeviceGetComputeInstanceId(Device device, unsigned *id) {
    *id = 0;
    return enter(device, "mig");
}
EXPORTED Result nvmlDeviceGetAttributes_v2(Device device, Attributes *to) {
    double memory;
    memset(to, 0, sizeof *to);
    Result result = whole(device, "mig", "slices", &to->instance_slices);
    if (!result) result = figure(device, "mig", "memory.total", &memory);
    to->compute_slices = to->instance_slices;
    if (!result) to->memory_mib = (unsigned long long)memory >> 20;
    return result;
}

/* ------------------------------------------------------------------ Xid events: `N.xids` holds `id:code` words */

typedef struct { int registered[GPUS]; long delivered[GPUS]; } EventSet;

/* The first event after `after` and its code, or its id 0; with code NULL the last id. */
static long next_xid(int gpu, long after, unsigned long long *code) {
    const char *line = text("%d.xids", gpu);
    long id, last = 0;
    unsigned long long found;
    int length;
    for (; line && sscanf(line, "%ld:%llu%n", &id, &found, &length) == 2; line += length) {
        if (code && id > after) return *code = found, id;
        last = id;
    }
    return code ? 0 : last;
}
EXPORTED Result nvmlEventSetCreate(EventSet **set) {
    *set = calloc(1, sizeof **set);
    return enter(NULL, "events");
}
EXPORTED Result nvmlDeviceGetSupportedEventTypes(Device device, unsigned long long *types) {
    *types = XID_EVENT;
    return enter(device, "events");
}
EXPORTED Result nvmlDeviceRegisterEvents(Device device, unsigned long long types, EventSet *set) {
    Result result = enter(device, "events");
    if (result || !(types & XID_EVENT)) return result;
    set->registered[device->gpu] = 1;
    set->delivered[device->gpu] = next_xid(device->gpu, 0, NULL);
    return SUCCESS;
}
EXPORTED Result nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned milliseconds) {
    unsigned long long end = microseconds() + milliseconds * 1000ULL;
    for (;;) {
        for (int gpu = 0; gpu < gpus(); gpu++) {
            unsigned long long code;
            long id = set->registered[gpu] ? next_xid(gpu, set->delivered[gpu], &code) : 0;
            if (!id) continue;
            set->delivered[gpu] = id;
            *event = (Event){handle(gpu, -1), XID_EVENT, code, 0xffffffff, 0xffffffff};
            return SUCCESS;
        }
        if (microseconds() >= end) return TIMEOUT;
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
}
EXPORTED Result nvmlEventSetWait(EventSet *s, Event *e, unsigned ms) { return nvmlEventSetWait_v2(s, e, ms); }
EXPORTED Result nvmlEventSetFree(EventSet *set) {
    free(set);
    return SUCCESS;
}
