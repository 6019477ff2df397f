// Threads that work on something together.

#pragma once

#include <sched.h>

#include <cstdint>

// How GNU's OpenMP runtime, and those compatible with it, start something on all threads.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

struct Threads {
    Parallel parallel;
    int (*team_size)();  // how many there really are, asked by one of them
    int64_t count;
};

namespace {

constexpr int SPINS = 4000;  // before a thread that waits lets others run

// All threads wait for each other. They spin: what they wait for takes microseconds.
struct Barrier {
    int64_t waiting, round;

    void wait(int64_t count) {
        if (count == 1) return;
        const int64_t now = __atomic_load_n(&round, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&waiting, 1, __ATOMIC_ACQ_REL) == count) {
            __atomic_store_n(&waiting, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&round, now + 1, __ATOMIC_RELEASE);
            return;
        }
        for (int spins = 0; __atomic_load_n(&round, __ATOMIC_ACQUIRE) == now; ++spins)
            if (spins > SPINS) sched_yield();
    }
};

// One of the threads.
struct Worker {
    int64_t index, count;
    Barrier *barrier;

    void wait() const { barrier->wait(count); }

    // Its share of something of this size.
    int64_t first(int64_t size) const { return size * index / count; }
    int64_t end(int64_t size) const { return size * (index + 1) / count; }
};

// Run work(worker) on all threads.
template <class Run>
void together(const Threads &threads, const Run &work) {
    struct Shared {
        const Threads &threads;
        const Run &work;
        Barrier barrier;
        int64_t next;
    } shared = {threads, work, {0, 0}, 0};
    if (threads.count <= 1) return work(Worker{0, 1, &shared.barrier});
    threads.parallel(
        [](void *data) {
            Shared &shared = *(Shared *)data;
            const int64_t index = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED);
            shared.work(Worker{index, shared.threads.team_size(), &shared.barrier});
        },
        &shared, (unsigned)threads.count, 0);
}

}  // namespace
