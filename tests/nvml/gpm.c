/* What the hardware counts between two samples: `N.gpm.2` is the mean of metric 2 (see nvml.h of NVIDIA), as
   told when it is asked. A GPU without such lines does not count. Seen on an H200: what is asked within a tenth
   of a second of the last sample is 0, and the memory's not a number. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "nvml.h"
#include "script.h"

#define SETTLED_SECONDS 0.1

typedef struct { int gpu; double at; } GpmSample;
typedef struct { unsigned version, supported; } GpmSupport;
typedef struct {
    unsigned metric;
    Result result;
    double value;
    struct { char *short_name, *long_name, *unit; } info;
} GpmMetric;
typedef struct { unsigned version, n; GpmSample *before, *after; GpmMetric metrics[]; } GpmAsked;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

EXPORTED Result nvmlGpmQueryDeviceSupport(Device device, GpmSupport *support) {
    double value;
    support->supported = figure(device, "gpm", "gpm.2", &value) == SUCCESS;
    return enter(device, "gpm");
}
EXPORTED Result nvmlGpmSampleAlloc(GpmSample **sample) {
    *sample = calloc(1, sizeof **sample);
    return enter(NULL, "gpm-alloc");
}
EXPORTED Result nvmlGpmSampleFree(GpmSample *sample) {
    free(sample);
    return SUCCESS;
}
EXPORTED Result nvmlGpmSampleGet(Device device, GpmSample *sample) {
    *sample = (GpmSample){device->gpu, now()};
    return enter(device, "gpm-sample");
}
EXPORTED Result nvmlGpmMetricsGet(GpmAsked *asked) {
    if (asked->version != 1 || asked->before->gpu != asked->after->gpu) return INVALID_ARGUMENT;
    Device device = handle(asked->after->gpu, -1);
    int settled = asked->after->at - asked->before->at >= SETTLED_SECONDS;
    for (unsigned i = 0; i < asked->n; i++) {
        char name[32];
        GpmMetric *metric = &asked->metrics[i];
        snprintf(name, sizeof name, "gpm.%u", metric->metric);
        metric->result = figure(device, "gpm-metrics", name, &metric->value);
        if (!settled) metric->value = metric->metric == 10 ? NAN : 0;
    }
    return enter(device, "gpm-metrics");
}
