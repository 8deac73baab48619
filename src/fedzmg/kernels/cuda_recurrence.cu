// Recurrent layers whose weights differ between clients: all time steps in one launch.
//
// PARTS blocks train one client. Each keeps the weights of 32 units in shared memory, some of them
// in registers, for the whole sequence. After a time step, blocks exchange 16-bit states (going
// back: gradients) through the L2 cache. They wait for each other, so all must be on the GPU
// together: the launch is cooperative. The host defines UNITS, GATES (3: GRU, 4: LSTM), TILES (of 8
// examples), BLOCKS (per multiprocessor) and FLOAT16 (else bfloat16).

constexpr int OWN = 32, PARTS = UNITS / OWN, WARPS = 8, BATCH = 8 * TILES;
constexpr int COUNT = (PARTS + WARPS - 1) / WARPS;  // parts whose results a warp reads
constexpr int IN_REGISTERS = TILES > 1 || BLOCKS > 1 ? 0 : GATES > 3 || COUNT < 2 ? 1 : 2;
constexpr int PADDING = 4;  // keeps accesses to shared memory free of conflicts
using u32 = unsigned;
using u16 = unsigned short;
using i64 = long long;

#ifdef __CUDACC__  // a test defines the same functions for a CPU

__device__ u32 narrow(float low, float high) {
    u32 both;
#if FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

// total (16 x 8) += a (16 x 16) b (16 x 8), in the layout of the instruction
__device__ void add_product(float (&total)[4], uint4 a, u32 b0, u32 b1) {
#if FLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(total[0]), "+f"(total[1]), "+f"(total[2]), "+f"(total[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ void send(u32* to, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(word) : "memory");
}

__device__ uint4 load_words(const u32* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ uint2 load_pair(const u32* from) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];"
        : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
}

#endif

// Blocks exchange 32-bit words. A word is EMPTY until it is written, once, so readers need no flag.
// A narrowed NaN is positive: no pair of values looks like EMPTY.
constexpr u32 EMPTY = 0xffffffff;

// Send one value of each lane of a warp.
__device__ void send_row(u32* to, float value, int lane) {
    float next = __shfl_down_sync(~0u, value, 1);
    if (lane % 2 == 0) send(to + lane / 2, narrow(value, next));
}

// Receive four words; note if one of them is missing.
__device__ uint4 receive(const u32* from, bool& missing) {
    uint4 v = load_words(from);
    missing |= v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY;
    return v;
}

__device__ float2 receive_pair(const u32* from, bool& missing) {
    uint2 v = load_pair(from);
    missing |= v.x == EMPTY || v.y == EMPTY;
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

__device__ float tanh_of(float x) {  // a decaying exponential cannot overflow
    float e = __expf(-2.0f * fabsf(x));
    return copysignf((1.0f - e) / (1.0f + e), x);
}

// Write the totals of a warp example by example: [warp, BATCH, rows].
template <int MTILES>
__device__ void store_totals(float* to, float (&total)[MTILES][TILES][4], int warp, int lane) {
    constexpr int STRIDE = 16 * MTILES + PADDING;
    for (int m = 0; m < MTILES; m++)
        for (int n = 0; n < TILES; n++)
            for (int i = 0; i < 4; i++) {
                int example = 8 * n + 2 * (lane % 4) + i % 2, row = 16 * m + 8 * (i / 2) + lane / 4;
                to[(warp * BATCH + example) * STRIDE + row] = total[m][n][i];
            }
}

// Sum a row of one example over the warps, each of which has read other parts.
template <int ROWS>
__device__ float sum_totals(const float* totals, int example, int row) {
    float sum = 0.0f;
    for (int warp = 0; warp < (WARPS < PARTS ? WARPS : PARTS); warp++)
        sum += totals[(warp * BATCH + example) * (ROWS + PADDING) + row];
    return sum;
}

// Compute states, cells of an LSTM and gates: [client, steps, batch, (4,) UNITS].
// Gates are reset, update, new and the product for new; of an LSTM write, keep, new and show.
// from_input: [client, batch, steps, GATES, UNITS]; bias: [client, GATES, UNITS];
// exchange: [client, steps, PARTS, BATCH, OWN], 16 bits.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) recurrence_forward(
    const float* from_input, const u16* weights, const float* bias, float* states, float* cells,
    float* gates, u32* exchange, int clients, int steps, int batch
) {
    constexpr int ROWS = GATES * OWN, MTILES = ROWS / 16, WORDS = BATCH * OWN / 2;
    extern __shared__ uint4 shared[];
    uint4* own_weights = shared;  // [PARTS, MTILES, 2, lane]
    float* totals = reinterpret_cast<float*>(shared + PARTS * MTILES * 2 * 32);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int part = blockIdx.x % PARTS, unit = part * OWN + lane;
    for (i64 client = blockIdx.x / PARTS; client < clients; client += gridDim.x / PARTS) {
        // Lanes keep their operands of two products: eight columns in a row are four of each.
        const u16* given = weights + client * GATES * UNITS * UNITS;
        for (int i = warp; i < PARTS * MTILES; i += WARPS) {
            int p = i / MTILES, row = i % MTILES * 16 + g;
            auto at = [&](int r) {
                i64 place = (r / OWN * UNITS + part * OWN + r % OWN) * UNITS + p * OWN + 8 * q;
                return *reinterpret_cast<const uint4*>(given + place);
            };
            uint4 upper = at(row), lower = at(row + 8), *to = own_weights + 64 * i + lane;
            to[0] = make_uint4(upper.x, lower.x, upper.y, lower.y);
            to[32] = make_uint4(upper.z, lower.z, upper.w, lower.w);
        }
        float own_bias[GATES], state[TILES] = {}, cell[TILES] = {};
        for (int k = 0; k < GATES; k++) own_bias[k] = bias[(client * GATES + k) * UNITS + unit];
        __syncthreads();
        uint4 held[IN_REGISTERS + 1][MTILES][2];
        for (int i = 0; i < IN_REGISTERS; i++)
            for (int m = 0; m < MTILES; m++)
                for (int h = 0; h < 2; h++)
                    if (int p = warp + WARPS * i; p < PARTS)
                        held[i][m][h] = own_weights[(p * MTILES + m) * 64 + 32 * h + lane];
        for (int time = 0; time < steps; time++) {
            float input[TILES][GATES], gate[TILES][4];
            for (int n = 0; n < TILES; n++)
                for (int k = 0; k < GATES; k++) {
                    int e = 8 * n + warp;
                    i64 place = (((client * batch + e) * steps + time) * GATES + k) * UNITS + unit;
                    input[n][k] = e < batch ? from_input[place] : 0.0f;
                }
            if (time > 0 && warp < PARTS) {
                float total[MTILES][TILES][4] = {};
                const u32* sent = exchange + (client * steps + time - 1) * PARTS * WORDS;
                for (int n = 0; n < TILES; n++) {
                    uint4 b[COUNT];
                    bool missing;
                    do {
                        missing = false;
                        for (int i = 0; i < COUNT; i++)
                            if (int p = warp + WARPS * i; p < PARTS) {
                                const u32* from = sent + p * WORDS + (8 * n + g) * OWN / 2;
                                b[i] = receive(from + 4 * q, missing);
                            }
                    } while (__any_sync(~0u, missing));
                    for (int i = 0; i < COUNT; i++)
                        for (int m = 0; m < MTILES; m++) {
                            int p = warp + WARPS * i;
                            if (p >= PARTS) continue;
                            const uint4* a = own_weights + (p * MTILES + m) * 64 + lane;
                            uint4 first = i < IN_REGISTERS ? held[i][m][0] : a[0];
                            uint4 second = i < IN_REGISTERS ? held[i][m][1] : a[32];
                            add_product(total[m][n], first, b[i].x, b[i].y);
                            add_product(total[m][n], second, b[i].z, b[i].w);
                        }
                }
                store_totals<MTILES>(totals, total, warp, lane);
            }
            __syncthreads();
            u32* to = exchange + ((client * steps + time) * PARTS + part) * WORDS;
            for (int n = 0; n < TILES; n++) {
                int e = 8 * n + warp;
                float hidden[GATES];
                for (int k = 0; k < GATES; k++) {
                    hidden[k] = own_bias[k];
                    if (time > 0) hidden[k] += sum_totals<ROWS>(totals, e, k * OWN + lane);
                }
                gate[n][0] = sigmoid(input[n][0] + hidden[0]);
                gate[n][1] = sigmoid(input[n][1] + hidden[1]);
                if (GATES == 3) {
                    gate[n][2] = tanh_of(input[n][2] + gate[n][0] * hidden[2]);
                    gate[n][3] = hidden[2];
                    state[n] = gate[n][2] + gate[n][1] * (state[n] - gate[n][2]);
                } else {
                    gate[n][2] = tanh_of(input[n][2] + hidden[2]);
                    gate[n][3] = sigmoid(input[n][GATES - 1] + hidden[GATES - 1]);
                    cell[n] = gate[n][1] * cell[n] + gate[n][0] * gate[n][2];
                    state[n] = gate[n][3] * tanh_of(cell[n]);
                }
                send_row(to + e * OWN / 2, e < batch ? state[n] : 0.0f, lane);
            }
            __syncthreads();  // before the next totals
            for (int n = 0; n < TILES; n++) {
                int e = 8 * n + warp;
                if (e >= batch) continue;
                i64 here = (client * steps + time) * batch + e;
                states[here * UNITS + unit] = state[n];
                if (GATES == 4) cells[here * UNITS + unit] = cell[n];
                for (int k = 0; k < 4; k++) gates[(here * 4 + k) * UNITS + unit] = gate[n][k];
            }
        }
    }
}

// Compute gradients of the gates' sums, to_hidden: [client, steps, batch, GATES, UNITS]; of a GRU
// also those of from_input, to_input, in the same layout. signal: [client, steps, batch, UNITS];
// of_cell (LSTM): [client, batch, UNITS]. exchange: [client, steps, PARTS, BATCH, GATES, OWN],
// 16 bits, relative to scales [client, steps, PARTS, BATCH], since gradients may be small.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) recurrence_backward(
    const float* signal, const float* of_cell, const float* states, const float* cells,
    const float* gates, const u16* weights, float* to_input, float* to_hidden, u32* exchange,
    u32* scales, int clients, int steps, int batch
) {
    constexpr int MTILES = OWN / 16;
    extern __shared__ uint4 shared[];
    uint4* own_weights = shared;  // [PARTS, GATES, MTILES, 2, lane]
    float* totals = reinterpret_cast<float*>(shared + PARTS * GATES * MTILES * 2 * 32);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int part = blockIdx.x % PARTS, unit = part * OWN + lane;
    for (i64 client = blockIdx.x / PARTS; client < clients; client += gridDim.x / PARTS) {
        const u16* given = weights + client * GATES * UNITS * UNITS;
        for (int i = warp; i < PARTS * GATES * MTILES; i += WARPS) {
            int p = i / (GATES * MTILES), k = i / MTILES % GATES, column = i % MTILES * 16 + g;
            auto at = [&](int c, int j) {
                i64 place = (k * UNITS + p * OWN + 8 * q + j) * UNITS + part * OWN + c;
                return given[place] | u32(given[place + UNITS]) << 16;
            };
            for (int h = 0; h < 2; h++)
                own_weights[64 * i + 32 * h + lane] = make_uint4(
                    at(column, 4 * h), at(column + 8, 4 * h),
                    at(column, 4 * h + 2), at(column + 8, 4 * h + 2));
        }
        float carried[TILES] = {};  // gradient of a state or cell that skips the weights
        if (GATES == 4)
            for (int n = 0; n < TILES; n++)
                if (int e = 8 * n + warp; e < batch)
                    carried[n] = of_cell[(client * batch + e) * UNITS + unit];
        __syncthreads();
        uint4 held[IN_REGISTERS + 1][GATES][MTILES][2];
        for (int i = 0; i < IN_REGISTERS; i++)
            for (int k = 0; k < GATES; k++)
                for (int m = 0; m < MTILES; m++)
                    for (int h = 0; h < 2; h++)
                        if (int p = warp + WARPS * i; p < PARTS)
                            held[i][k][m][h] =
                                own_weights[((p * GATES + k) * MTILES + m) * 64 + 32 * h + lane];
        for (int time = steps - 1; time >= 0; time--) {
            float down[TILES], old[TILES], cell[TILES], gate[TILES][4];
            for (int n = 0; n < TILES; n++) {
                int e = 8 * n + warp;
                bool real = e < batch;
                i64 here = (client * steps + time) * batch + e;
                const float* past = GATES == 3 ? states : cells;
                down[n] = real ? signal[here * UNITS + unit] : 0.0f;
                old[n] = real && time > 0 ? past[(here - batch) * UNITS + unit] : 0.0f;
                cell[n] = real && GATES == 4 ? cells[here * UNITS + unit] : 0.0f;
                for (int k = 0; k < 4; k++)
                    gate[n][k] = real ? gates[(here * 4 + k) * UNITS + unit] : 0.0f;
            }
            bool is_last = time == steps - 1;
            if (!is_last && warp < PARTS) {
                float total[MTILES][TILES][4] = {};
                i64 sent = (client * steps + time + 1) * PARTS;
                for (int n = 0; n < TILES; n++) {
                    uint4 b[COUNT][GATES];
                    float2 scale[COUNT];
                    bool missing;
                    do {  // Scales are sent last, and take less to read again.
                        missing = false;
                        for (int i = 0; i < COUNT; i++)
                            if (int p = warp + WARPS * i; p < PARTS) {
                                const u32* from = scales + (sent + p) * BATCH + 8 * n;
                                scale[i] = receive_pair(from + 2 * q, missing);
                            }
                    } while (__any_sync(~0u, missing));
                    do {
                        missing = false;
                        for (int i = 0; i < COUNT; i++)
                            if (int p = warp + WARPS * i; p < PARTS)
                                for (int k = 0; k < GATES; k++) {
                                    i64 row = ((sent + p) * BATCH + 8 * n + g) * GATES + k;
                                    b[i][k] = receive(exchange + row * OWN / 2 + 4 * q, missing);
                                }
                    } while (__any_sync(~0u, missing));
                    for (int i = 0; i < COUNT; i++) {
                        int p = warp + WARPS * i;
                        if (p >= PARTS) continue;
                        float found[MTILES][4] = {};
                        for (int k = 0; k < GATES; k++)
                            for (int m = 0; m < MTILES; m++) {
                                const uint4* a =
                                    own_weights + ((p * GATES + k) * MTILES + m) * 64 + lane;
                                uint4 first = i < IN_REGISTERS ? held[i][k][m][0] : a[0];
                                uint4 second = i < IN_REGISTERS ? held[i][k][m][1] : a[32];
                                add_product(found[m], first, b[i][k].x, b[i][k].y);
                                add_product(found[m], second, b[i][k].z, b[i][k].w);
                            }
                        for (int m = 0; m < MTILES; m++)
                            for (int j = 0; j < 4; j++)
                                total[m][n][j] += (j % 2 ? scale[i].y : scale[i].x) * found[m][j];
                    }
                }
                store_totals<MTILES>(totals, total, warp, lane);
            }
            __syncthreads();
            float found[TILES][GATES], direct[TILES];  // of sums; of a GRU's new state
            i64 to = (client * steps + time) * PARTS + part;
            for (int n = 0; n < TILES; n++) {
                int e = 8 * n + warp;
                float one = gate[n][0], two = gate[n][1], fresh = gate[n][2], last = gate[n][3];
                if (!is_last) down[n] += sum_totals<OWN>(totals, e, lane);
                if (GATES == 3) {  // reset, update, new, product
                    down[n] += carried[n];
                    direct[n] = down[n] * (1.0f - two) * (1.0f - fresh * fresh);
                    found[n][0] = direct[n] * last * one * (1.0f - one);
                    found[n][1] = down[n] * (old[n] - fresh) * two * (1.0f - two);
                    found[n][2] = direct[n] * one;
                    carried[n] = down[n] * two;
                } else {  // write, keep, new, show
                    float bent = tanh_of(cell[n]);
                    float of_cell = carried[n] + down[n] * last * (1.0f - bent * bent);
                    found[n][0] = of_cell * fresh * one * (1.0f - one);
                    found[n][1] = of_cell * old[n] * two * (1.0f - two);
                    found[n][2] = of_cell * one * (1.0f - fresh * fresh);
                    found[n][GATES - 1] = down[n] * bent * last * (1.0f - last);
                    carried[n] = of_cell * two;
                }
                float top = 0.0f;
                for (int k = 0; k < GATES; k++) top = fmaxf(top, fabsf(found[n][k]));
                for (int other = 16; other > 0; other /= 2)
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
                top = top > 0.0f ? top : 1.0f;
                i64 row = to * BATCH + e;
                for (int k = 0; k < GATES; k++)
                    send_row(exchange + (row * GATES + k) * OWN / 2, found[n][k] / top, lane);
                if (lane == 0) send(scales + row, __float_as_uint(top));
            }
            __syncthreads();  // before the next totals
            for (int n = 0; n < TILES; n++) {
                int e = 8 * n + warp;
                if (e >= batch) continue;
                i64 here = (client * steps + time) * batch + e;
                for (int k = 0; k < GATES; k++) {
                    to_hidden[(here * GATES + k) * UNITS + unit] = found[n][k];
                    if (GATES == 3)
                        to_input[(here * 3 + k) * UNITS + unit] = k < 2 ? found[n][k] : direct[n];
                }
            }
        }
    }
}
