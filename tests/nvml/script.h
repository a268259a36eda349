/* The script: lines of `key value`, read again whenever the file changes. */
#ifndef STAND_IN_SCRIPT_H
#define STAND_IN_SCRIPT_H

/* The value of a key, e.g. text("%d.uuid", 3); NULL where the script has none. Valid until the next call. */
const char *text(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A number, or the point of a curve (`0:20 10:80`: seconds since the script's start, straight between). */
int number(const char *key, double *value);

/* What the script does to a call: 0, or the error it returns. A scripted hang or crash happens in here. */
int fault(int gpu, const char *call);

#endif
