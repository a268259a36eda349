/* libnvidia-ml.so.1 without a driver: NVML's calls, answered from a script (script.py).

   It stands below everything that is tested with it: pynvml, the exporter and NVIDIA's device plugin load it
   as they load the real one. What the script does not mention is "not supported", as on cards that lack it. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>

#include "script.h"

static struct { int gpu, mig; } handles[GPUS][MIGS + 1];
static int users;

Device handle(int gpu, int mig) {
    handles[gpu][mig + 1].gpu = gpu;
    handles[gpu][mig + 1].mig = mig;
    return (Device)&handles[gpu][mig + 1];
}

int gpus(void) {
    double value = 0;
    number("devices", &value);
    return value < 0 ? 0 : value > GPUS ? GPUS : (int)value;
}

int migs(int gpu) {
    int n = 0;
    while (n < MIGS && text("%d.mig.%d.uuid", gpu, n)) n++;
    return n;
}

/* Every call begins here: is the library up, does the device exist, does the script spoil the call? */
Result enter(Device device, const char *call) {
    if (!users) return UNINITIALIZED;
    if (!text("devices")) return UNKNOWN; /* the driver was there and is gone */
    if (device && device->gpu >= gpus()) return GPU_IS_LOST;
    return fault(device ? device->gpu : -1, call);
}

Result figure(Device device, const char *call, const char *name, double *value) {
    Result result = enter(device, call);
    if (result) return result;
    char key[96];
    if (device->mig < 0) snprintf(key, sizeof key, "%d.%s", device->gpu, name);
    else snprintf(key, sizeof key, "%d.mig.%d.%s", device->gpu, device->mig, name);
    return number(key, value) ? SUCCESS : NOT_SUPPORTED;
}

Result whole(Device device, const char *call, const char *name, unsigned *value) {
    double found;
    Result result = figure(device, call, name, &found);
    if (!result) *value = (unsigned)found;
    return result;
}

static Result copied(const char *from, char *to, unsigned room) {
    if (!from) return NOT_SUPPORTED;
    if (strlen(from) >= room) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* ------------------------------------------------------------------ library and system */

EXPORTED Result nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!text("devices")) return DRIVER_NOT_LOADED;
    Result result = fault(-1, "init");
    if (!result) users++;
    return result;
}
EXPORTED Result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORTED Result nvmlInit(void) { return nvmlInitWithFlags(0); }
EXPORTED Result nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

EXPORTED const char *nvmlErrorString(Result result) {
    static __thread char words[64];
    snprintf(words, sizeof words, "NVML error %d of the stand-in", result);
    return words;
}

EXPORTED Result nvmlSystemGetDriverVersion(char *to, unsigned room) {
    Result result = enter(NULL, "driver");
    return result ? result : copied(text("driver"), to, room);
}
EXPORTED Result nvmlSystemGetNVMLVersion(char *to, unsigned room) { return nvmlSystemGetDriverVersion(to, room); }
EXPORTED Result nvmlSystemGetCudaDriverVersion(int *version) {
    double value;
    if (!number("cuda", &value)) return NOT_SUPPORTED;
    *version = (int)value;
    return SUCCESS;
}
EXPORTED Result nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* ------------------------------------------------------------------ which devices there are */

EXPORTED Result nvmlDeviceGetCount_v2(unsigned *n) {
    Result result = enter(NULL, "count");
    *n = (unsigned)gpus();
    return result;
}
EXPORTED Result nvmlDeviceGetCount(unsigned *n) { return nvmlDeviceGetCount_v2(n); }
EXPORTED Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    if ((int)index >= gpus()) return INVALID_ARGUMENT;
    *device = handle((int)index, -1);
    return enter(*device, "handle");
}
EXPORTED Result nvmlDeviceGetHandleByIndex(unsigned i, Device *d) { return nvmlDeviceGetHandleByIndex_v2(i, d); }
EXPORTED Result nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    for (int gpu = 0; gpu < gpus(); gpu++) {
        const char *own = text("%d.uuid", gpu);
        if (own && !strcmp(own, uuid)) return *device = handle(gpu, -1), enter(*device, "handle");
        for (int mig = 0; mig < migs(gpu); mig++)
            if (!strcmp(text("%d.mig.%d.uuid", gpu, mig), uuid)) return *device = handle(gpu, mig), SUCCESS;
    }
    return NOT_FOUND;
}
EXPORTED Result nvmlDeviceGetIndex(Device device, unsigned *index) {
    *index = (unsigned)(device->mig < 0 ? device->gpu : device->mig);
    return enter(device, "index");
}
EXPORTED Result nvmlDeviceGetMinorNumber(Device device, unsigned *number) { return nvmlDeviceGetIndex(device, number); }
EXPORTED Result nvmlDeviceGetUUID(Device device, char *to, unsigned room) {
    Result result = enter(device, "uuid");
    if (result) return result;
    return copied(
        device->mig < 0 ? text("%d.uuid", device->gpu) : text("%d.mig.%d.uuid", device->gpu, device->mig), to, room);
}
EXPORTED Result nvmlDeviceGetName(Device device, char *to, unsigned room) {
    Result result = enter(device, "name");
    return result ? result : copied(text("%d.name", device->gpu), to, room);
}
EXPORTED Result nvmlDeviceGetPciInfo_v3(Device device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x10 + (unsigned)device->gpu;
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:00.0", 0, pci->bus);
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:00.0", 0, pci->bus);
    return enter(device, "pci");
}
EXPORTED Result nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    *major = 9, *minor = 0;
    return enter(device, "capability");
}

/* ------------------------------------------------------------------ figures */

EXPORTED Result nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) {
    Result result = whole(device, "utilization", "utilization", &rates->gpu);
    return result ? result : whole(device, "utilization", "memory.utilization", &rates->memory);
}
EXPORTED Result nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *memory) {
    double total, used;
    Result result = figure(device, "memory", "memory.total", &total);
    if (!result) result = figure(device, "memory", "memory.used", &used);
    if (result) return result;
    memory->total = (unsigned long long)total, memory->used = (unsigned long long)used;
    memory->reserved = 0, memory->free = memory->total - memory->used;
    return SUCCESS;
}
EXPORTED Result nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    MemoryV2 both;
    Result result = nvmlDeviceGetMemoryInfo_v2(device, &both);
    if (!result) *memory = (Memory){both.total, both.free, both.used};
    return result;
}
EXPORTED Result nvmlDeviceGetPowerUsage(Device d, unsigned *mw) { return whole(d, "power", "power", mw); }
EXPORTED Result nvmlDeviceGetEnforcedPowerLimit(Device d, unsigned *mw) {
    return whole(d, "power-limit", "power.limit", mw);
}
EXPORTED Result nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *mj) {
    double value;
    Result result = figure(device, "energy", "energy", &value);
    if (!result) *mj = (unsigned long long)value;
    return result;
}
EXPORTED Result nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius) {
    (void)sensor;
    return whole(device, "temperature", "temperature", celsius);
}
EXPORTED Result nvmlDeviceGetClockInfo(Device device, int kind, unsigned *mhz) {
    return whole(device, "clock", kind == 2 ? "clock.memory" : "clock.sm", mhz);
}
EXPORTED Result nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *bits) {
    double value;
    Result result = figure(device, "slowed", "slowed", &value);
    if (!result) *bits = (unsigned long long)value;
    return result;
}
EXPORTED Result nvmlDeviceGetTotalEccErrors(Device device, int kind, int counter, unsigned long long *n) {
    (void)counter;
    double value;
    Result result = figure(device, "ecc", kind ? "ecc.uncorrected" : "ecc.corrected", &value);
    if (!result) *n = (unsigned long long)value;
    return result;
}
EXPORTED Result nvmlDeviceGetFieldValues(Device device, int n, Field *fields) {
    Result result = enter(device, "fields");
    for (int i = 0; !result && i < n; i++) {
        char key[96];
        double value = 0;
        snprintf(key, sizeof key, "%d.field.%u", device->gpu, fields[i].field);
        fields[i].result = number(key, &value) ? SUCCESS : NOT_SUPPORTED;
        double type = 3; /* unsigned long long */
        snprintf(key, sizeof key, "%d.field.%u.type", device->gpu, fields[i].field);
        number(key, &type);
        fields[i].type = (int)type;
        fields[i].value.u = (unsigned long long)value;
    }
    return result;
}
