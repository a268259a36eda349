/* The time of day WALL_CLOCK_AHEAD seconds ahead (negative: behind) for a program that asks libc for it.
 *
 * As on a machine whose clock is set wrong, nothing else changes: not the monotonic clock, nor how long a wait
 * is. Waits until a time of day are put back into the kernel's own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define A_TIME_OF_DAY 1000000000 /* No machine has been up for so many seconds: September 2001. */

static time_t ahead;

__attribute__((constructor)) static void begin(void)
{
    const char *told = getenv("WALL_CLOCK_AHEAD");
    ahead = told ? atol(told) : 0;
}

static int is_wall(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && is_wall(clock))
        now->tv_sec += ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact))
        return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where)
        *where = exact.tv_sec;
    return exact.tv_sec;
}

static struct timespec kernels(const struct timespec *until)
{
    struct timespec real = *until;
    if (real.tv_sec > A_TIME_OF_DAY)
        real.tv_sec -= ahead;
    return real;
}

static void *next(const char *name)
{
    /* Without a version the first one that there ever was would be found. */
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{
    static int (*real)(clockid_t, int, const struct timespec *, struct timespec *);
    struct timespec moved = *until;
    if (!real)
        real = next("clock_nanosleep");
    if ((flags & TIMER_ABSTIME) && is_wall(clock))
        moved = kernels(until);
    return real(clock, flags, &moved, left);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec moved = kernels(until);
    if (!real)
        real = next("pthread_cond_timedwait");
    return real(cond, mutex, &moved);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    struct timespec moved = kernels(until);
    if (!real)
        real = next("pthread_cond_clockwait");
    return real(cond, mutex, clock, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec moved = kernels(until);
    if (!real)
        real = next("sem_timedwait");
    return real(semaphore, &moved);
}
