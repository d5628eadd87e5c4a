// What a kernel of one-warp blocks needs to be compiled and run on a CPU: the words of CUDA C++, and the 32
// threads of a warp as fibers that change at every exchange, so that each hands over what all others see.

#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>

#define __device__
#define __global__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct ulonglong2 {
    unsigned long long x, y;
};
struct Index {
    unsigned x;
};

namespace warp {
constexpr unsigned SIZE = 32;
constexpr std::size_t STACK = 128 << 10;
inline Index thread, block;
inline ucontext_t scheduler, fibers[SIZE];
inline bool ended[SIZE];
inline unsigned long long words[2][SIZE]; // of this exchange and of the one before, which slower threads still read
inline unsigned exchanges[SIZE];
inline char stacks[SIZE][STACK];
inline void (*kernel)();

inline void start() {
    kernel();
    ended[thread.x] = true;
}

// Runs the kernel as block `number`. Aborts unless all threads take part in every exchange.
inline void run(void (*body)(), unsigned number) {
    kernel = body, block.x = number;
    for (unsigned t = 0; t < SIZE; ++t) {
        ended[t] = false, exchanges[t] = 0;
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks[t], fibers[t].uc_stack.ss_size = STACK, fibers[t].uc_link = &scheduler;
        makecontext(&fibers[t], start, 0);
    }
    for (unsigned running = SIZE; running;) {
        running = 0;
        for (unsigned t = 0; t < SIZE; ++t) {
            thread.x = t;
            if (!ended[t]) swapcontext(&scheduler, &fibers[t]);
            running += !ended[t];
        }
        if (running % SIZE) std::abort();
    }
}

inline unsigned long long exchange(unsigned mask, unsigned long long word, unsigned bit) {
    const unsigned t = thread.x, turn = exchanges[t]++ % 2;
    if (mask != 0xffffffffu || bit >= SIZE) std::abort();
    words[turn][t] = word;
    swapcontext(&fibers[t], &scheduler);
    if (exchanges[t] != exchanges[t ^ bit] && exchanges[t] + 1 != exchanges[t ^ bit]) std::abort();
    return words[turn][t ^ bit];
}
} // namespace warp

#define threadIdx warp::thread
#define blockIdx warp::block
#define __shfl_xor_sync(mask, word, bit) warp::exchange(mask, word, bit)

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// A GPU faults where an address is not a multiple of the load's size
template <class T> inline T __ldcs(const T* address) {
    if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T)) std::abort();
    return *address;
}
