/* A team of persistent threads that run one function together.

   Each calling thread has a team of its own, so two engines in one process share none. A member that waits spins,
   because the next piece of work usually comes soon, and then sleeps: an idle team takes no time from other processes.
   After some microseconds of spinning it offers its core to others: beside busy processes, two members may share one. After a fork the child starts a new team. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#define PAUSES 200    /* before a core is offered to others: some microseconds */
#define SPIN 100      /* microseconds, for other members */
#define JOB_SPIN 1000 /* microseconds, for the next piece of work: longer than the pause between two steps */
#define MOST_THREADS 256

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

typedef struct team team;

/* A member of a team at work. */
typedef struct {
    team *of;
    int me, n; /* 0 <= me < n */
} member;

typedef void work(const member *m, void *arg);

/* A number that some threads wait for others to change. */
typedef struct {
    _Alignas(64) atomic_uint value;
    atomic_int n_asleep;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} signal_word;

struct team {
    signal_word job, phase; /* changes: a function is to be run; all members have arrived */
    _Alignas(64) atomic_int n_here;
    _Alignas(64) work *function;
    void *arg;
    int n, n_asked, is_over; /* n: as many as could be had */
    pid_t process;
    pthread_t threads[MOST_THREADS];
};

static double microseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static void signal_init(signal_word *s) {
    atomic_init(&s->value, 0);
    atomic_init(&s->n_asleep, 0);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
}

static void signal_end(signal_word *s) {
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
}

/* Change the number, and wake those that sleep. */
static void signal_change(signal_word *s) {
    atomic_fetch_add(&s->value, 1);
    if (atomic_load(&s->n_asleep) == 0) return; /* whoever falls asleep from now on sees the new number */
    pthread_mutex_lock(&s->lock);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* Wait until the number is no longer `old`; sleep after `spin` microseconds. */
static void signal_wait(signal_word *s, unsigned old, double spin) {
    double until = 0.0;
    for (unsigned i = 1; atomic_load_explicit(&s->value, memory_order_acquire) == old; i++) {
        if (i < PAUSES) {
            PAUSE();
            continue;
        }
        sched_yield(); /* the thread that is waited for may share this core */
        if (i % 8) continue;
        double now = microseconds();
        if (until == 0.0) until = now + spin;
        if (now < until) continue;
        pthread_mutex_lock(&s->lock);
        atomic_fetch_add(&s->n_asleep, 1);
        while (atomic_load(&s->value) == old) pthread_cond_wait(&s->changed, &s->lock);
        atomic_fetch_sub(&s->n_asleep, 1);
        pthread_mutex_unlock(&s->lock);
        return;
    }
}

/* Wait until all members of the team have come here. */
static void meet(const member *m) {
    team *t = m->of;
    if (m->n == 1) return;
    unsigned old = atomic_load_explicit(&t->phase.value, memory_order_acquire);
    if (atomic_fetch_add(&t->n_here, 1) == m->n - 1) {
        atomic_store(&t->n_here, 0);
        signal_change(&t->phase);
    } else {
        signal_wait(&t->phase, old, SPIN);
    }
}

/* This member's share of n pieces: from *first to *last, half-open. */
static void share_of(const member *m, int n, int *first, int *last) {
    *first = (int)((int64_t)m->me * n / m->n);
    *last = (int)((int64_t)(m->me + 1) * n / m->n);
}

typedef struct {
    team *of;
    int me;
} place;

static void *serve(void *arg) {
    place at = *(place *)arg;
    free(arg);
    team *t = at.of;
    for (unsigned old = 0;; old++) {
        signal_wait(&t->job, old, JOB_SPIN);
        if (t->is_over) return NULL;
        member m = {t, at.me, t->n};
        t->function(&m, t->arg);
        meet(&m);
    }
}

static void team_end(void *arg) {
    team *t = arg;
    if (t->process == getpid()) {
        t->is_over = 1;
        signal_change(&t->job);
        for (int i = 1; i < t->n; i++) pthread_join(t->threads[i], NULL);
        signal_end(&t->job);
        signal_end(&t->phase);
    }
    free(t);
}

static team *team_start(int n) {
    team *t = aligned_alloc(64, (sizeof(team) + 63) / 64 * 64);
    if (!t) return NULL;
    memset(t, 0, sizeof *t);
    signal_init(&t->job);
    signal_init(&t->phase);
    t->process = getpid();
    t->n_asked = n;
    t->n = 1;
    for (; t->n < n && t->n < MOST_THREADS; t->n++) {
        place *at = malloc(sizeof *at);
        if (!at) break;
        *at = (place){t, t->n};
        if (pthread_create(&t->threads[t->n], NULL, serve, at)) { /* no more threads can be had: a smaller team */
            free(at);
            break;
        }
    }
    return t;
}

static pthread_key_t own_team;
static pthread_once_t is_made = PTHREAD_ONCE_INIT;

static void make_key(void) { pthread_key_create(&own_team, team_end); }

/* The calling thread's team, of n threads. */
static team *team_of(int n) {
    pthread_once(&is_made, make_key);
    team *t = pthread_getspecific(own_team);
    if (n > MOST_THREADS) n = MOST_THREADS;
    if (t && t->process == getpid() && t->n_asked == n) return t;
    if (t) team_end(t);
    t = team_start(n);
    pthread_setspecific(own_team, t);
    return t;
}

/* Run a function on n threads, and return when all are done. */
static void together(int n, work *function, void *arg) {
    if (n > 1) {
        team *t = team_of(n);
        if (t && t->n > 1) {
            member m = {t, 0, t->n};
            t->function = function;
            t->arg = arg;
            signal_change(&t->job);
            function(&m, arg);
            meet(&m);
            return;
        }
    }
    member alone = {NULL, 0, 1};
    function(&alone, arg);
}
