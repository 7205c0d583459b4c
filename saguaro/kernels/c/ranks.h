/* The exchange of tensors between processes that compute one model together, through memory that they share.

   Pieces alternate between two rooms: a rank that writes piece k + 2 knows that all have read piece k, because it has
   read piece k + 1 of all. A rank that waits spins, then offers its core to others, then sleeps. */

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define MOST_RANKS 64
#define NAP 20 /* milliseconds of sleep, at most: then a lost rank is noticed */

typedef struct {
    _Alignas(64) atomic_uint n_written; /* pieces of this rank so far */
    atomic_int n_asleep;                /* ranks that sleep until it changes */
} rank_word;

/* The beginning of the shared memory; all zero at first. Behind it [2][n_ranks] rooms. */
typedef struct {
    _Alignas(64) atomic_int is_lost; /* a rank has ended */
    rank_word ranks[MOST_RANKS];
} meeting;

/* Sleep until the number of pieces may have changed from `old`. */
static void nap(rank_word *of, unsigned old) {
    struct timespec time = {0, NAP * 1000000};
#ifdef __linux__
    syscall(SYS_futex, &of->n_written, FUTEX_WAIT, old, &time, NULL, 0);
#else
    (void)of, (void)old;
    time.tv_nsec = 50000;
    nanosleep(&time, NULL);
#endif
}

static void write_word(rank_word *own, unsigned n) {
    atomic_store(&own->n_written, n);
#ifdef __linux__
    if (atomic_load(&own->n_asleep)) syscall(SYS_futex, &own->n_written, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* Wait until a rank has written n pieces. Returns 0; 1 if a rank was lost; 2 after so many seconds. */
static int await_rank(meeting *at, rank_word *of, unsigned n, double seconds) {
    double until = 0.0, limit = 0.0;
    for (unsigned i = 1;; i++) {
        unsigned now_written = atomic_load_explicit(&of->n_written, memory_order_acquire);
        if ((int)(now_written - n) >= 0) return 0;
        if (i < PAUSES) {
            PAUSE();
            continue;
        }
        sched_yield();
        if (i % 8) continue;
        double now = microseconds();
        if (until == 0.0) until = now + SPIN, limit = now + 1e6 * seconds;
        if (now < until) continue;
        if (atomic_load(&at->is_lost)) return 1;
        if (now > limit) return 2;
        atomic_fetch_add(&of->n_asleep, 1);
        nap(of, now_written);
        atomic_fetch_sub(&of->n_asleep, 1);
    }
}

/* out [n_ranks][n_bytes]: x [n_bytes] of every rank. All ranks call this equally often, with the same sizes; room: bytes
   of a room. Returns as await_rank. */
int exchange(void *shared, int rank, int n_ranks, int64_t room, const void *x, int64_t n_bytes, void *out,
             double seconds) {
    meeting *at = shared;
    char *rooms = (char *)shared + sizeof(meeting);
    for (int64_t from = 0; from < n_bytes; from += room) {
        size_t n = n_bytes - from < room ? n_bytes - from : room;
        unsigned piece = atomic_load(&at->ranks[rank].n_written) + 1;
        char *here = rooms + (size_t)(piece & 1) * n_ranks * room;
        memcpy(here + (size_t)rank * room, (const char *)x + from, n);
        write_word(&at->ranks[rank], piece);
        for (int step = 0; step < n_ranks; step++) {
            int other = (rank + step) % n_ranks;
            int fault = other == rank ? 0 : await_rank(at, &at->ranks[other], piece, seconds);
            if (fault) return fault;
            memcpy((char *)out + (size_t)other * n_bytes + from, here + (size_t)other * room, n);
        }
    }
    return 0;
}

/* Bytes of the memory that n_ranks ranks share. */
int64_t shared_bytes(int n_ranks, int64_t room) { return sizeof(meeting) + 2 * n_ranks * room; }
