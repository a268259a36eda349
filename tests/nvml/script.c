/* Reads NVML_SCRIPT, else gpus.txt beside the library (stand_in.py tells the keys). Writers replace the
   file whole, by a rename.

   Threads: one lock around the lines; a hang sleeps without it, as a driver hangs one caller. */
#define _GNU_SOURCE
#include "script.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

typedef struct { char *key, *value; } Line;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *content;
static Line *lines;
static size_t count;
static struct stat seen;
static int there;

static int by_key(const void *a, const void *b) { return strcmp(((const Line *)a)->key, ((const Line *)b)->key); }

static void load(const char *path, const struct stat *now) {
    free(content);
    free(lines);
    content = NULL, lines = NULL, count = 0;
    FILE *file = fopen(path, "rb");
    if (!file) return;
    content = malloc((size_t)now->st_size + 1);
    size_t size = fread(content, 1, (size_t)now->st_size, file);
    fclose(file);
    content[size] = 0;
    size_t room = 1;
    for (size_t i = 0; i < size; i++) room += content[i] == '\n';
    lines = malloc(room * sizeof *lines);
    char *rest;
    for (char *line = strtok_r(content, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *space = strchr(line, ' ');
        if (*line == '#' || !space) continue;
        *space = 0;
        lines[count++] = (Line){line, space + 1};
    }
    qsort(lines, count, sizeof *lines, by_key);
}

static const char *path_of_script(void) {
    static char beside[4096];
    const char *named = getenv("NVML_SCRIPT");
    if (named) return named;
    Dl_info own;
    if (!*beside && dladdr((void *)path_of_script, &own)) {
        snprintf(beside, sizeof beside - 16, "%s", own.dli_fname);
        char *slash = strrchr(beside, '/');
        strcpy(slash ? slash + 1 : beside, "gpus.txt");
    }
    return beside;
}

static void refresh(void) {
    const char *path = path_of_script();
    struct stat now;
    if (stat(path, &now)) {
        there = 0, count = 0;
        return;
    }
    if (there && now.st_ino == seen.st_ino && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec && now.st_size == seen.st_size)
        return;
    load(path, &now);
    seen = now, there = 1;
}

static int find(const char *key, char *out, size_t room) {
    pthread_mutex_lock(&lock);
    refresh();
    Line wanted = {(char *)key, NULL};
    Line *found = count ? bsearch(&wanted, lines, count, sizeof *lines, by_key) : NULL;
    if (found) snprintf(out, room, "%s", found->value);
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

const char *text(const char *format, ...) {
    static __thread char value[65536];
    char key[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(key, sizeof key, format, arguments);
    va_end(arguments);
    return find(key, value, sizeof value) ? value : NULL;
}

static double elapsed(void) {
    struct timespec now;
    char start[64];
    clock_gettime(CLOCK_REALTIME, &now);
    double since = find("start", start, sizeof start) ? atof(start) : (double)seen.st_mtim.tv_sec;
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9 - since;
}

int number(const char *key, double *value) {
    char curve[4096];
    if (!find(key, curve, sizeof curve)) return 0;
    if (!strchr(curve, ':')) {
        *value = atof(curve);
        return 1;
    }
    double now = elapsed(), second, point, before_second = 0, before = 0;
    char *rest;
    int first = 1;
    for (char *word = strtok_r(curve, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        if (sscanf(word, "%lf:%lf", &second, &point) != 2) continue;
        if (now < second) {
            double part = first || second == before_second ? 1 : (now - before_second) / (second - before_second);
            *value = first ? point : before + part * (point - before);
            return 1;
        }
        before_second = second, before = point, first = 0;
    }
    *value = before;
    return !first;
}

int fault(int gpu, const char *call) {
    char key[4][96], what[64];
    snprintf(key[0], sizeof key[0], "%d.fault.%s", gpu, call);
    snprintf(key[1], sizeof key[1], "%d.fault.any", gpu);
    snprintf(key[2], sizeof key[2], "fault.%s", call);
    snprintf(key[3], sizeof key[3], "fault.any");
    for (int i = gpu < 0 ? 2 : 0; i < 4; i++) {
        if (!find(key[i], what, sizeof what)) continue;
        double seconds;
        if (!strcmp(what, "crash")) abort();
        if (sscanf(what, "hang %lf", &seconds) == 1) {
            struct timespec rest = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
            nanosleep(&rest, NULL);
            return 0;
        }
        return atoi(what);
    }
    return 0;
}
