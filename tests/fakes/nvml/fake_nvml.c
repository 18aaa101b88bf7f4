/* A stand-in for NVIDIA's libnvidia-ml.so.1 that answers from a scenario file.
 *
 * It has the functions of NVML that the agent calls, with NVML's signatures, structures and error codes
 * (nvml.h), so that pynvml loads it as it loads the real one. The file named by FAKE_NVML_SCENARIO is read again at
 * every call: a test changes the machine under a running process by replacing the file. Its lines are written by
 * fake_nvml.py, which documents them. Nothing of the agent's policy is in here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    UNKNOWN = 999,
};

enum { MAX_GPUS = 32, MAX_SLICES = 7, MAX_PROCESSES = 64, MAX_LINKS = 36, MAX_XIDS = 64, TEXT = 96 };

typedef struct {
    int present, error, error_after_uuid, mig, slices;
    char uuid[TEXT], bus[32], name[TEXT];
    unsigned long long memory_mib, used_mib, ecc;
    int pending, failed, memory_v1;
} Device;

typedef struct { int gpu, slot, pid; unsigned long long memory_mib; } Process;
typedef struct { int gpu, link; char remote[32]; } Link;
typedef struct { int sequence, gpu, xid; } Xid;

typedef struct {
    int init, gpus;
    char driver[TEXT];
    Device whole[MAX_GPUS];
    Device slice[MAX_GPUS][MAX_SLICES];
    int path[MAX_GPUS][MAX_GPUS];
    Process process[MAX_PROCESSES];
    Link link[MAX_GPUS * MAX_LINKS];
    Xid xid[MAX_XIDS];
    int processes, links, xids;
} Scenario;

static Scenario now;
static int last_xid_sequence;

static void chomp(char *line) { line[strcspn(line, "\n")] = 0; }

static void read_scenario(void) {
    const char *path = getenv("FAKE_NVML_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    memset(&now, 0, sizeof now);
    if (!file) {
        now.init = UNKNOWN;
        return;
    }
    char line[512];
    while (fgets(line, sizeof line, file)) {
        int gpu = 0, slot = 0, other = 0, value = 0, used = 0;
        chomp(line);
        if (sscanf(line, "init %d", &now.init) == 1) continue;
        if (sscanf(line, "driver %95s", now.driver) == 1) continue;
        if (sscanf(line, "gpu %d", &gpu) == 1 && gpu < MAX_GPUS) {
            Device *device = &now.whole[gpu];
            device->present = 1;
            now.gpus = gpu >= now.gpus ? gpu + 1 : now.gpus;
            sscanf(line, "gpu %*d uuid=%95s bus=%31s memory=%llu used=%llu error=%d late=%d ecc=%llu pending=%d "
                   "failed=%d mig=%d v1=%d name=%95[^\n]",
                   device->uuid, device->bus, &device->memory_mib, &device->used_mib, &device->error,
                   &device->error_after_uuid, &device->ecc, &device->pending, &device->failed, &device->mig,
                   &device->memory_v1, device->name);
            continue;
        }
        if (sscanf(line, "slice %d %d%n", &gpu, &slot, &used) == 2 && gpu < MAX_GPUS && slot < MAX_SLICES) {
            Device *device = &now.slice[gpu][slot];
            device->present = 1;
            sscanf(line + used, " uuid=%95s memory=%llu used=%llu slices=%d error=%d name=%95[^\n]", device->uuid,
                   &device->memory_mib, &device->used_mib, &device->slices, &device->error_after_uuid, device->name);
            continue;
        }
        if (sscanf(line, "path %d %d %d", &gpu, &other, &value) == 3 && gpu < MAX_GPUS && other < MAX_GPUS) {
            now.path[gpu][other] = now.path[other][gpu] = value;
            continue;
        }
        if (now.processes < MAX_PROCESSES) {
            Process *process = &now.process[now.processes];
            if (sscanf(line, "process %d %d %d %llu", &process->gpu, &process->slot, &process->pid,
                       &process->memory_mib) == 4) {
                now.processes++;
                continue;
            }
        }
        if (now.links < MAX_GPUS * MAX_LINKS) {
            Link *link = &now.link[now.links];
            if (sscanf(line, "nvlink %d %d %31s", &link->gpu, &link->link, link->remote) == 3) {
                now.links++;
                continue;
            }
        }
        if (now.xids < MAX_XIDS) {
            Xid *xid = &now.xid[now.xids];
            if (sscanf(line, "xid %d %d %d", &xid->sequence, &xid->gpu, &xid->xid) == 3) now.xids++;
        }
    }
    fclose(file);
}

/* A handle is a number: 0x1000 + 0x100 * GPU + (slot + 1 for a MIG device, else 0). It is never followed. */
typedef void *Handle;

static Handle handle_of(int gpu, int slot) { return (Handle)(size_t)(0x1000 + 0x100 * gpu + slot + 1); }
static int gpu_of(Handle handle) { return (int)(((size_t)handle - 0x1000) / 0x100); }
static int slot_of(Handle handle) { return (int)(((size_t)handle - 0x1000) % 0x100) - 1; }

/* Reads the scenario and finds the device; `late` is whether the call comes after that of the UUID. */
static int find(Handle handle, Device **found, int late) {
    read_scenario();
    if (now.init) return now.init;
    int gpu = gpu_of(handle), slot = slot_of(handle);
    if (gpu < 0 || gpu >= MAX_GPUS || slot >= MAX_SLICES) return INVALID_ARGUMENT;
    Device *whole = &now.whole[gpu];
    *found = slot < 0 ? whole : &now.slice[gpu][slot];
    if (whole->error) return whole->error;
    if (late && whole->error_after_uuid) return whole->error_after_uuid;
    if (late && (*found)->error_after_uuid) return (*found)->error_after_uuid;
    return (*found)->present ? SUCCESS : NOT_FOUND;
}

#define FIND(late)                                     \
    Device *device = NULL;                             \
    int status = find(handle, &device, late);          \
    if (status) return status

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    read_scenario();
    return now.init;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case TIMEOUT: return "Timeout";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    read_scenario();
    snprintf(text, length, "%s", now.driver);
    return now.init;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    read_scenario();
    *count = (unsigned)now.gpus;
    return now.init;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
    Device *device = NULL;
    *handle = handle_of((int)index, -1);
    return find(*handle, &device, 0);
}

int nvmlDeviceGetUUID(Handle handle, char *text, unsigned length) {
    FIND(0);
    snprintf(text, length, "%s", device->uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(Handle handle, char *text, unsigned length) {
    FIND(1);
    snprintf(text, length, "%s", device->name);
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
/* What a driver keeps for itself on an idle GPU; the first version of the call counts it as used. */
static const unsigned long long RESERVED_MIB = 600;

int nvmlDeviceGetMemoryInfo(Handle handle, Memory *memory) {
    FIND(1);
    memory->total = device->memory_mib << 20;
    memory->used = (device->used_mib + RESERVED_MIB) << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Handle handle, MemoryV2 *memory) {
    FIND(1);
    if (device->memory_v1) return NOT_SUPPORTED;
    memory->total = device->memory_mib << 20;
    memory->reserved = RESERVED_MIB << 20;
    memory->used = device->used_mib << 20;
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;

int nvmlDeviceGetPciInfo_v3(Handle handle, Pci *pci) {
    FIND(1);
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", device->bus);
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Handle handle, int kind, int counter, unsigned long long *count) {
    FIND(1);
    /* 1 is NVML_MEMORY_ERROR_TYPE_UNCORRECTED, 0 is NVML_VOLATILE_ECC */
    *count = kind == 1 && counter == 0 ? device->ecc : 0;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(Handle handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    FIND(1);
    *corrected = *uncorrected = 0;
    *pending = (unsigned)device->pending;
    *failed = (unsigned)device->failed;
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } ProcessV3;

int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *count, ProcessV3 *infos) {
    FIND(1);
    unsigned found = 0;
    for (int i = 0; i < now.processes; i++) {
        if (now.process[i].gpu != gpu_of(handle) || now.process[i].slot != slot_of(handle)) continue;
        if (found < *count && infos) {
            infos[found].pid = (unsigned)now.process[i].pid;
            infos[found].memory = now.process[i].memory_mib << 20;
            infos[found].gpu_instance = infos[found].compute_instance = 0xFFFFFFFF;
        }
        found++;
    }
    status = found > *count ? INSUFFICIENT_SIZE : SUCCESS;
    *count = found;
    return status;
}

int nvmlDeviceGetMigMode(Handle handle, unsigned *current, unsigned *pending) {
    FIND(1);
    if (device->mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)device->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle handle, unsigned *count) {
    FIND(1);
    *count = MAX_SLICES;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned index, Handle *slice) {
    FIND(1);
    if (index >= MAX_SLICES || !now.slice[gpu_of(handle)][index].present) return NOT_FOUND;
    *slice = handle_of(gpu_of(handle), (int)index);
    return SUCCESS;
}

typedef struct {
    unsigned multiprocessors, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mb;
} Attributes;

int nvmlDeviceGetAttributes_v2(Handle handle, Attributes *attributes) {
    FIND(1);
    memset(attributes, 0, sizeof *attributes);
    attributes->gpu_slices = attributes->compute_slices = (unsigned)device->slices;
    attributes->memory_mb = device->memory_mib;
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(Handle handle, Handle other, int *level) {
    FIND(1);
    *level = now.path[gpu_of(handle)][gpu_of(other)];
    return SUCCESS;
}

static const Link *link_of(Handle handle, unsigned number) {
    for (int i = 0; i < now.links; i++)
        if (now.link[i].gpu == gpu_of(handle) && now.link[i].link == (int)number) return &now.link[i];
    return NULL;
}

int nvmlDeviceGetNvLinkState(Handle handle, unsigned number, int *active) {
    FIND(1);
    if (!now.links) return NOT_SUPPORTED;
    *active = link_of(handle, number) != NULL;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle handle, unsigned number, Pci *pci) {
    FIND(1);
    const Link *link = link_of(handle, number);
    if (!link) return INVALID_ARGUMENT;
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", link->remote);
    return SUCCESS;
}

/* 0 is NVML_NVLINK_DEVICE_TYPE_GPU, 2 is NVML_NVLINK_DEVICE_TYPE_SWITCH */
int nvmlDeviceGetNvLinkRemoteDeviceType(Handle handle, unsigned number, int *type) {
    FIND(1);
    const Link *link = link_of(handle, number);
    if (!link) return INVALID_ARGUMENT;
    *type = 2;
    for (int gpu = 0; gpu < now.gpus; gpu++)
        if (!strcmp(now.whole[gpu].bus, link->remote)) *type = 0;
    return SUCCESS;
}

int nvmlEventSetCreate(Handle *set) {
    *set = (Handle)&last_xid_sequence;
    return SUCCESS;
}

int nvmlEventSetFree(Handle set) {
    (void)set;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Handle handle, unsigned long long types, Handle set) {
    FIND(1);
    (void)types;
    (void)set;
    return SUCCESS;
}

typedef struct {
    Handle device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} Event;

/* Gives each XID of the scenario once, in the order of its sequence numbers. */
int nvmlEventSetWait_v2(Handle set, Event *event, unsigned milliseconds) {
    (void)set;
    (void)milliseconds;
    read_scenario();
    const Xid *next = NULL;
    for (int i = 0; i < now.xids; i++)
        if (now.xid[i].sequence > last_xid_sequence && (!next || now.xid[i].sequence < next->sequence))
            next = &now.xid[i];
    if (!next) return TIMEOUT;
    last_xid_sequence = next->sequence;
    memset(event, 0, sizeof *event);
    event->device = handle_of(next->gpu, -1);
    event->type = 8; /* nvmlEventTypeXidCriticalError */
    event->data = (unsigned long long)next->xid;
    return SUCCESS;
}
