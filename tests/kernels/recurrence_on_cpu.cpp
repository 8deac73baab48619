// cuda_recurrence.cu on a CPU, for its test: a process for every block, a thread for every GPU thread.
// Warp instructions meet at barriers. Arrays must be in memory that processes share.

#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)

struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct Place { int x; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
static unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
#define __expf expf

static thread_local Place threadIdx, blockIdx, gridDim;
alignas(16) uint4 shared[1 << 14];
static std::barrier<> block(256);
static std::vector<std::barrier<>*> warps;
static unsigned exchanged[8][32][6];  // words of the lanes of each warp

static void meet() { warps[threadIdx.x / 32]->arrive_and_wait(); }
static void __syncthreads() { block.arrive_and_wait(); }

// Write some words of every lane, and read those of all lanes.
template <typename Read>
static auto among_lanes(std::initializer_list<unsigned> words, Read read) {
    auto& own = exchanged[threadIdx.x / 32];
    std::copy(words.begin(), words.end(), own[threadIdx.x % 32]);
    meet();
    auto found = read(own);
    meet();
    return found;
}

static float of_lane(float value, int lane) {
    return among_lanes({__float_as_uint(value)}, [&](auto& all) {
        return __uint_as_float(all[lane < 32 ? lane : 31][0]);
    });
}

static float __shfl_down_sync(unsigned, float value, int by) {
    return of_lane(value, threadIdx.x % 32 + by);
}

static float __shfl_xor_sync(unsigned, float value, int by) {
    return of_lane(value, (threadIdx.x % 32) ^ by);
}

static bool __any_sync(unsigned, bool value) {
    return among_lanes({value}, [](auto& all) {
        bool any = false;
        for (auto& one : all) any |= one[0];
        return any;
    });
}

static float widen(unsigned half) {
#if FLOAT16
    return float(std::bit_cast<_Float16>(std::uint16_t(half)));
#else
    return __uint_as_float(half << 16);
#endif
}

static unsigned narrow(float low, float high) {
    auto one = [](float v) -> unsigned {
#if FLOAT16
        return std::bit_cast<std::uint16_t>(_Float16(v));
#else
        unsigned bits = __float_as_uint(v);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
    };
    return one(low) | one(high) << 16;
}

// The instruction mma.m16n8k16: lane 4 g + q holds rows g, g + 8 and columns 2 q, 2 q + 1, + 8.
static void add_product(float (&total)[4], uint4 a, unsigned b0, unsigned b1) {
    among_lanes({a.x, a.y, a.z, a.w, b0, b1}, [&](auto& all) {
        int lane = threadIdx.x % 32;
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (int k = 0; k < 16; k++) {
                int q = k % 8 / 2, upper = k / 8, shift = k % 2 * 16;
                unsigned left = all[row % 8 * 4 + q][upper * 2 + row / 8];
                unsigned right = all[column * 4 + q][4 + upper];
                total[i] += widen(left >> shift & 0xffff) * widen(right >> shift & 0xffff);
            }
        }
        return 0;
    });
}

static unsigned load(const unsigned* from) {
    return std::atomic_ref(*const_cast<unsigned*>(from)).load(std::memory_order_relaxed);
}

static void send(unsigned* to, unsigned word) {
    std::atomic_ref(*to).store(word, std::memory_order_relaxed);
}

static uint4 load_words(const unsigned* from) {
    return {load(from), load(from + 1), load(from + 2), load(from + 3)};
}

static uint2 load_pair(const unsigned* from) { return {load(from), load(from + 1)}; }

using std::copysign;
#include "cuda_recurrence.cu"

static int run(int blocks, const std::function<void()>& kernel) {
    for (int b = 0; b < blocks; b++)
        if (fork() == 0) {
            for (int w = 0; w < 8; w++) warps.push_back(new std::barrier<>(32));
            std::vector<std::thread> threads;
            for (int t = 0; t < 256; t++)
                threads.emplace_back([=] {
                    threadIdx.x = t, blockIdx.x = b, gridDim.x = blocks;
                    kernel();
                });
            for (auto& thread : threads) thread.join();
            _exit(0);
        }
    int failed = 0, status = 0;
    for (int b = 0; b < blocks; b++) wait(&status), failed |= status;
    return failed;
}

extern "C" int forward(
    const float* from_input, const u16* weights, const float* bias, float* states, float* cells,
    float* gates, u32* exchange, int clients, int steps, int batch, int blocks
) {
    return run(blocks, [=] {
        recurrence_forward(
            from_input, weights, bias, states, cells, gates, exchange, clients, steps, batch);
    });
}

extern "C" int backward(
    const float* signal, const float* of_cell, const float* states, const float* cells,
    const float* gates, const u16* weights, float* to_input, float* to_hidden, u32* exchange,
    u32* scales, int clients, int steps, int batch, int blocks
) {
    return run(blocks, [=] {
        recurrence_backward(
            signal, of_cell, states, cells, gates, weights, to_input, to_hidden, exchange, scales,
            clients, steps, batch);
    });
}
