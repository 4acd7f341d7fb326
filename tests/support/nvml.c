/* Stand-in for libnvidia-ml.so.1: answers with the devices of the file that NVML_RECORD names.
 *
 * A line has: index uuid total_mib used_mib utilization power_mw reasons divided name
 * A whole GPU has as many errors in its memory as the last digit of its used MiB.
 * An instance of MIG has the index `GPU:place`, and its GPU has `divided` 1.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, ALREADY, NOT_FOUND };
enum { DRIVER_NOT_LOADED = 9, MAX_DEVICES = 32, MAX_PLACES = 7 };

typedef struct {
    int gpu, place; /* place is -1 for a whole GPU */
    char uuid[96], name[96];
    unsigned long long total, used, reasons;
    int utilization, power, divided;
} Device;

static Device devices[MAX_DEVICES];
static int num_devices;

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("NVML_RECORD");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return DRIVER_NOT_LOADED;
    char line[512], index[32];
    num_devices = 0;
    while (num_devices < MAX_DEVICES && fgets(line, sizeof line, file)) {
        Device *d = &devices[num_devices];
        if (sscanf(line, "%31s %95s %llu %llu %d %d %llu %d %95[^\n]", index, d->uuid, &d->total,
                   &d->used, &d->utilization, &d->power, &d->reasons, &d->divided, d->name) != 9)
            continue;
        d->place = -1;
        sscanf(index, "%d:%d", &d->gpu, &d->place);
        num_devices++;
    }
    fclose(file);
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Unknown Error";
}

static int find(int gpu, int place, Device **found) {
    for (int i = 0; i < num_devices; i++)
        if (devices[i].gpu == gpu && devices[i].place == place) {
            *found = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 0;
    for (int i = 0; i < num_devices; i++) *count += devices[i].place < 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **d) { return find(index, -1, d); }

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **d) {
    for (int i = 0; i < num_devices; i++)
        if (!strcmp(devices[i].uuid, uuid)) {
            *d = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    *current = *pending = d->divided;
    return d->divided < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *count) {
    *count = d->divided > 0 ? MAX_PLACES : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned place, Device **instance) {
    return find(d->gpu, place, instance);
}

int nvmlDeviceGetUUID(Device *d, char *out, unsigned size) {
    return snprintf(out, size, "%s", d->uuid) < 0;
}

int nvmlDeviceGetName(Device *d, char *out, unsigned size) {
    return snprintf(out, size, "%s", d->name) < 0;
}

int nvmlDeviceGetMemoryInfo(Device *d, unsigned long long *out) {
    out[0] = d->total << 20;
    out[1] = (d->total - d->used) << 20;
    out[2] = d->used << 20;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *d, unsigned *out) {
    out[0] = d->utilization;
    return d->place < 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPowerUsage(Device *d, unsigned *out) {
    *out = d->power;
    return d->place < 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *d, unsigned long long *out) {
    *out = d->reasons;
    return d->place < 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetTotalEccErrors(Device *d, int kind, int counter, unsigned long long *out) {
    (void)kind, (void)counter;
    *out = d->used % 10;
    return d->place < 0 ? SUCCESS : NOT_SUPPORTED;
}
