/* The part of NVML's binary interface that the stand-in speaks: names and layouts as callers expect them. */
#ifndef STAND_IN_NVML_H
#define STAND_IN_NVML_H

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    UNKNOWN = 999,
};

#define GPUS 64
#define MIGS 8 /* of one GPU */
#define NOT_AVAILABLE 0xffffffffffffffffULL
#define XID_EVENT 8ULL
#define EXPORTED __attribute__((visibility("default")))

/* Callers hold pointers to these and look at nothing inside. `mig` is -1 for a whole GPU. */
typedef struct { int gpu, mig; } *Device;
typedef int Result;

typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} Pci;
typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute_instance; } Process;
typedef struct { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; } Sample;
typedef struct {
    unsigned field, scope;
    long long time, latency;
    unsigned type;
    Result result;
    union { double d; unsigned long long u; } value;
} Field;
typedef struct {
    Device device;
    unsigned long long type, data;
    unsigned instance, compute_instance;
} Event;
typedef struct {
    unsigned processors, copy_engines, decoders, encoders, jpeg, ofa, instance_slices, compute_slices;
    unsigned long long memory_mib;
} Attributes;

/* Shared by the files of the stand-in. `call` is the name that a script spoils the call by. */
Device handle(int gpu, int mig);
int gpus(void);
int migs(int gpu);
Result enter(Device device, const char *call);
Result figure(Device device, const char *call, const char *name, double *value);
Result whole(Device device, const char *call, const char *name, unsigned *value);

#endif
