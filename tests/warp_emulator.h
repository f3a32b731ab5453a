// One warp on a CPU: 32 fibers that run by turns from one warp-wide operation to the next. Puts the words of CUDA that
// route_fused.cu uses into C++, so that its arithmetic is tested without a GPU. All lanes must reach the same operation.
#include <cfenv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define __device__
#define __global__
#define __launch_bounds__(n)

static ucontext_t fiber[32], caller;
static char stacks[32][1 << 16];
static int lane_now, running;
static struct { int x; } blockIdx;
static struct { operator int() const { return lane_now; } } lane_of_fiber;
static struct ThreadIdx { decltype(lane_of_fiber)& x = lane_of_fiber; } threadIdx;

static unsigned posted[2][32], line[2][32], turn[32];

static void next_fiber() {
    int before = lane_now;
    lane_now = (lane_now + 1) % 32;
    swapcontext(&fiber[before], &fiber[lane_now]);
}

static const unsigned* all_lanes(unsigned value, unsigned at) {
    int lane = lane_now, side = turn[lane]++ & 1;
    posted[side][lane] = value;
    line[side][lane] = at;
    next_fiber();
    for (int i = 0; i < 32; i++)
        if (line[side][i] != at) { fprintf(stderr, "lanes part at lines %u and %u\n", at, line[side][i]); abort(); }
    return posted[side];
}

template <class T> static unsigned bits_from(T x) { unsigned y; memcpy(&y, &x, 4); return y; }
template <class T> static T bits_to(unsigned x) { T y; memcpy(&y, &x, 4); return y; }
template <class T> static T shuffle(T x, int from, unsigned at) { return bits_to<T>(all_lanes(bits_from(x), at)[from]); }
static unsigned reduce(unsigned x, bool most, unsigned at) {
    const unsigned* all = all_lanes(x, at);
    unsigned y = all[0];
    for (int i = 1; i < 32; i++) y = (all[i] > y) == most ? all[i] : y;
    return y;
}
static unsigned ballot(bool x, unsigned at) {
    const unsigned* all = all_lanes(x, at);
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= all[i] << i;
    return y;
}
#define __shfl_sync(mask, x, from) shuffle(x, (from) & 31, __LINE__)
#define __shfl_up_sync(mask, x, by) shuffle(x, lane_now >= (by) ? lane_now - (by) : lane_now, __LINE__)
#define __reduce_max_sync(mask, x) reduce(x, true, __LINE__)
#define __reduce_min_sync(mask, x) reduce(x, false, __LINE__)
#define __ballot_sync(mask, x) ballot(x, __LINE__)
#define __any_sync(mask, x) (ballot(x, __LINE__) != 0)

template <class T> static T max(T x, T y) { return x > y ? x : y; }
template <class T> static T min(T x, T y) { return x < y ? x : y; }
static unsigned __float_as_uint(float x) { return bits_from(x); }
static float __uint_as_float(unsigned x) { return bits_to<float>(x); }
static float __int_as_float(int x) { return bits_to<float>(x); }
static int __ffs(unsigned x) { return __builtin_ffs(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static float __fmaf_rz(float x, float y, float z) {
    volatile float a = x, b = y, c = z;
    fesetround(FE_TOWARDZERO);
    volatile float d = fmaf(a, b, c);
    fesetround(FE_TONEAREST);
    return d;
}
static float power_of_2(float x) { return (float)exp2((double)x); }
static float quotient(float x, float y) { return x / y; }
static int load_now(const int* at) { return *at; }

#include KERNEL

struct Arguments {
    const void* logits; const float* bias; const int* slots; const float* value; const int* lo; const int* hi;
    int* own; int* ids; float* weights; long long* counters; int* error; int layer;
};
static Arguments given;

static void run_lane() {
    route_fused((const LOGIT*)given.logits, given.bias, given.slots, given.value, given.lo, given.hi, given.own,
                given.ids, given.weights, given.counters, given.error, given.layer);
    if (--running == 0) setcontext(&caller);
    next_fiber();
}

extern "C" void emulate(int num_rows, const Arguments* arguments) {
    given = *arguments;
    for (blockIdx.x = 0; blockIdx.x < num_rows; blockIdx.x++) {
        for (int i = 0; i < 32; i++) {
            getcontext(&fiber[i]);
            fiber[i].uc_stack.ss_sp = stacks[i];
            fiber[i].uc_stack.ss_size = sizeof stacks[i];
            makecontext(&fiber[i], run_lane, 0);
            turn[i] = 0;
        }
        lane_now = 0;
        running = 32;
        swapcontext(&caller, &fiber[0]);
    }
}
