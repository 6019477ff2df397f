// A thread team: running a function on all threads, and the barrier between its phases.

#pragma once

#include "vectors.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

// Signature of GOMP_parallel, which runs a function on all threads. GNU's OpenMP runtime and
// compatible runtimes export it.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

struct Threads {
    Parallel parallel;
    int (*team_size)();  // omp_get_num_threads: the actual team size, called within the team
    int64_t count;       // requested number of threads
};

namespace {

// Iterations of waiting before a thread sleeps: microseconds, longer than threads that have their
// cores wait for each other.
constexpr int SPINS_BEFORE_SLEEP = 1000;

INLINE void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

// A barrier whose threads spin and then sleep. A thread that sleeps gives its core to a thread of
// the team that has none, which other work on the machine may have interrupted.
struct Barrier {
    int32_t num_waiting, round, num_sleeping;

    void wait(int64_t count) {
        if (count == 1) return;
        const int32_t current_round = __atomic_load_n(&round, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&num_waiting, 1, __ATOMIC_ACQ_REL) == count) {
            __atomic_store_n(&num_waiting, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&round, current_round + 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&num_sleeping, __ATOMIC_SEQ_CST))
                syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
            return;
        }
        for (int spins = 0; spins < SPINS_BEFORE_SLEEP; ++spins) {
            if (__atomic_load_n(&round, __ATOMIC_ACQUIRE) != current_round) return;
            pause_briefly();
        }
        __atomic_fetch_add(&num_sleeping, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&round, __ATOMIC_SEQ_CST) == current_round)
            syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, current_round, nullptr, nullptr, 0);
        __atomic_fetch_sub(&num_sleeping, 1, __ATOMIC_SEQ_CST);
    }
};

// One thread of the team.
struct Worker {
    int64_t index, count;
    Barrier *barrier;

    void wait() const { barrier->wait(count); }

    // First index and end index of this thread's share of size items.
    int64_t first(int64_t size) const { return size * index / count; }
    int64_t end(int64_t size) const { return size * (index + 1) / count; }
};

// Runs work(worker) on all threads and returns when all have finished.
template <class Work>
void run_on_team(const Threads &threads, const Work &work) {
    struct Shared {
        const Threads &threads;
        const Work &work;
        Barrier barrier;
        int64_t next_index;
    } shared = {threads, work, {0, 0, 0}, 0};
    if (threads.count <= 1) return work(Worker{0, 1, &shared.barrier});
    threads.parallel(
        [](void *data) {
            Shared &shared = *(Shared *)data;
            const int64_t index = __atomic_fetch_add(&shared.next_index, 1, __ATOMIC_RELAXED);
            shared.work(Worker{index, shared.threads.team_size(), &shared.barrier});
        },
        &shared, (unsigned)threads.count, 0);
}

}  // namespace
