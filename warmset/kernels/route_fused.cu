// Top-k, margin swap, weights and counters of one row in one warp: route_fused in CUDA C++.
//
//   logits -> scores -> packed keys -> the three best of each lane -> rounds of one REDUX -> swap -> weights
//
// A key is one distinct 32-bit number: above the score in fixed point, below the expert's index, turned round, and the
// lowest bit says resident. The fixed point spans what can matter, from the least of the 32 lanes' greatest scores (at
// least 32 experts reach it) to the row's greatest, and is made by one addition to 2^23, which keeps the order of
// floats. Neighbours in the order with equal fixed points are compared as floats; where these differ, where a pick lies
// at the lower end of the span, or where the span is not finite, the row is done again by exact 64-bit keys.
//
// The lines put before this text fix E (experts), K (picks), VEC (experts a load brings a lane), LOGIT (float or
// unsigned short for bf16), SIGMOID, HAS_BIAS, RENORM, SCALE and SWAP (MarginSwap or Exact).

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
__device__ inline float power_of_2(float x) { float y; asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ inline float quotient(float x, float y) {
    float z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
// Volatile: the load is made early, beside the rounds, and not where the value is used first.
__device__ inline int load_now(const int* at) {
    int x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}
#endif

constexpr u32 ALL = 0xffffffffu;
constexpr int PER = (E + 32 * VEC - 1) / (32 * VEC) * VEC;  // experts a lane
__device__ constexpr int bits_of(int n) { return n < 2 ? 0 : 1 + bits_of(n / 2 + n % 2); }
constexpr int BITS = bits_of(PER * 32) < 8 ? 8 : bits_of(PER * 32);
constexpr int SHIFT = BITS + 1;      // of the fixed point in a key
constexpr int POINT = 32 - SHIFT;    // its bits, at most 23
constexpr u32 LAST_INDEX = (1u << BITS) - 1;
constexpr u32 SPENT = 0xffffffffu;   // a lane has no more in its list
constexpr u32 MINUS_INF_KEY = 0x007fffffu;
#define INF __int_as_float(0x7f800000)
constexpr float FLOAT_MAX = 3.4028234663852886e38f;
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(K < 32 && K <= E, "lane K holds the first expert that was not picked");
static_assert(SIGMOID || RENORM, "a sum over all experts has an order of its own");

__device__ inline float clean(float x) { return fminf(fmaxf(x, -INF), FLOAT_MAX); }

__device__ inline float sigmoid(float x) { return quotient(1.0f, power_of_2(x * -LOG2_E) + 1.0f); }

__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(unsigned short x) { return __uint_as_float((u32)x << 16); }

// Selection score from a logit; not cleaned.
__device__ inline float score_of(float logit, const float* bias, int expert) {
    if (!SIGMOID) return logit;
    float score = sigmoid(logit);
    return HAS_BIAS ? score + bias[expert] : score;
}

// Unsigned, in the order of floats; 0.0 and -0.0 alike. No NaN.
__device__ inline u32 order_key(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

__device__ inline float from_key(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ inline int expert_of(u32 key) { return (int)(LAST_INDEX - ((key >> 1) & LAST_INDEX)); }

template <int N> struct Vector;
template <> struct Vector<1> { LOGIT x[1]; };
template <> struct alignas(4 * sizeof(LOGIT)) Vector<4> { LOGIT x[4]; };
template <int N> struct Slots;
template <> struct Slots<1> { int x[1]; };
template <> struct alignas(16) Slots<4> { int x[4]; };

template <int N> __device__ inline float greatest_of(const float* x) {
    if constexpr (N == 1) return x[0];
    else return fmaxf(greatest_of<N / 2>(x), greatest_of<N - N / 2>(x + N / 2));
}

// The three greatest of some keys.
struct Best { u32 a, b, c; };

__device__ inline Best merge(Best x, Best y) {
    return {max(x.a, y.a), max(min(x.a, y.a), max(x.b, y.b)),
            max(max(x.c, y.c), max(min(x.b, y.a), min(x.a, y.b)))};
}

template <int N> __device__ inline Best best_of(const u32* keys) {
    if constexpr (N == 1) return {keys[0], 0, 0};
    else return merge(best_of<N / 2>(keys), best_of<N - N / 2>(keys + N / 2));
}

// Lane r gets the r-th greatest key of the warp, r < count; 0 where there is none. One REDUX a round: the lane that held
// the greatest goes on to its next. Where a lane has given its three, the rounds that are left look at all keys.
// FIXED: `count` is K + 1, and there are as many.
template <bool FIXED> __device__ inline u32 greatest(const u32 (&keys)[PER], int count, int lane) {
    Best list = best_of<PER>(keys);
    u32 beyond = PER > 3 ? SPENT : 0;
    u32 mine = 0, best = 0;
#pragma unroll(FIXED ? K + 1 : 1)
    for (int rank = 0; rank < (FIXED ? K + 1 : count); rank++) {
        best = __reduce_max_sync(ALL, list.a);
        if (lane == rank) mine = best;
        bool gave = list.a == best;
        list.a = gave ? list.b : list.a;
        list.b = gave ? list.c : list.b;
        list.c = gave ? beyond : list.c;
        if (!FIXED && best == 0) break;
    }
    if (best == SPENT) {
        int rank = __ffs(__ballot_sync(ALL, mine == SPENT)) - 1;
        if (lane >= rank) mine = 0;
        u32 last = __shfl_sync(ALL, mine, rank > 0 ? rank - 1 : 0);
        if (rank == 0) last = 0;
#pragma unroll 1
        for (; rank < count && (rank == 0 || last != 0); rank++) {
            u32 below = 0;  // key - last wraps round: all that lies below `last` comes out above the rest
#pragma unroll
            for (int i = 0; i < PER; i++) below = max(below, keys[i] - last);
            last += __reduce_max_sync(ALL, below);
            if (lane == rank) mine = last;
        }
    }
    return mine;
}

// The next expert of the exact order after `last`, as its 64-bit key; 0 where there is none.
__device__ inline u64 exact_next(u64 last, const LOGIT* logits, const float* bias, const int* slots, bool residents,
                                 int lane) {
    u64 best = 0;
#pragma unroll 1
    for (int e = lane; e < E; e += 32) {
        u64 key = (u64)order_key(clean(score_of(as_float(logits[e]), bias, e))) << 32 | (ALL - (u32)e);
        if (key < last && key > best && (!residents || slots[e] >= 0)) best = key;
    }
    u32 high = __reduce_max_sync(ALL, (u32)(best >> 32));
    u32 low = __reduce_max_sync(ALL, (u32)(best >> 32) == high ? (u32)best : 0);
    return (u64)high << 32 | low;
}

// What lane r knows of rank r, and the warp of the row.
struct Row {
    int own, id;
    float weight;
    int tail_cold, swaps, cold;
    bool in_error, unsure;
};

template <bool EXACT>
__device__ inline Row route_row(const u32 (&keys)[PER], bool finite, const LOGIT* logits, const float* bias,
                                const int* slots, float margin, int lo, int hi, int lane) {
    Row row = {};
    bool picked = lane < K;
    u32 key = 0, last = 0;
    u64 last_exact = ~0ull;
    bool is_cold;
    if constexpr (!EXACT) {
        key = greatest<true>(keys, K + 1, lane);
        last = __shfl_sync(ALL, key, K - 1);
        row.own = lane <= K ? min(expert_of(key), E - 1) : 0;
        is_cold = picked && !(key & 1);
    } else {
#pragma unroll 1
        for (int rank = 0; rank < K; rank++) {
            last_exact = exact_next(last_exact, logits, bias, slots, false, lane);
            if (lane == rank) row.own = min((int)(ALL - (u32)last_exact), E - 1);
        }
        row.in_error = (u32)(last_exact >> 32) <= MINUS_INF_KEY;
        is_cold = picked && slots[row.own] < 0;
    }
    float logit = as_float(logits[row.own]);
    float score = clean(score_of(logit, bias, row.own));
    if constexpr (!EXACT) {
        u32 key_before = __shfl_up_sync(ALL, key, 1);
        float score_before = __shfl_up_sync(ALL, score, 1);
        row.unsure = !finite || (lane == K - 1 && (key >> SHIFT) == 0) ||
                     (lane > 0 && lane <= K && key >> SHIFT == key_before >> SHIFT && score != score_before);
    }
    u32 cold_bits = __ballot_sync(ALL, is_cold);
    row.cold = __popc(cold_bits);
    row.tail_cold = row.cold;
    row.id = row.own;
    u32 tail_bits = 0;
    if constexpr (SWAP) {
        tail_bits = __ballot_sync(ALL, is_cold && lane >= lo && lane <= hi);
        row.tail_cold = __popc(tail_bits);
        if (tail_bits) {
            // Lane i gets the i-th best resident that was not picked, and one more than can be needed, for its score.
            int substitute = 0;
            bool there = false;
            u32 below = 0;
            if constexpr (!EXACT) {
                u32 free[PER];
#pragma unroll
                for (int i = 0; i < PER; i++) free[i] = keys[i] & 1 ? keys[i] - last : 0;
                below = greatest<false>(free, row.tail_cold + 1, lane);
                there = lane <= row.tail_cold && below > ~last;
                below = there ? below + last : 0;
                substitute = there ? min(expert_of(below), E - 1) : 0;
            } else {
#pragma unroll 1
                for (int rank = 0; rank < row.tail_cold; rank++) {
                    last_exact = exact_next(last_exact, logits, bias, slots, true, lane);
                    if (lane == rank) {
                        there = (u32)(last_exact >> 32) > MINUS_INF_KEY;
                        substitute = there ? (int)(ALL - (u32)last_exact) : 0;
                    }
                }
            }
            float other_logit = as_float(logits[substitute]);
            float other = clean(score_of(other_logit, bias, substitute));
            if constexpr (!EXACT) {
                u32 key_before = __shfl_up_sync(ALL, below, 1);
                float score_before = __shfl_up_sync(ALL, other, 1);
                bool tied = lane > 0 && key_before >> SHIFT == below >> SHIFT && other != score_before;
                row.unsure |= there && (tied || (lane < row.tail_cold && (below >> SHIFT) == 0));
            }
            int num_there = __popc(__ballot_sync(ALL, there));
            int from = -1;
            for (u32 left = tail_bits; left != 0 && row.swaps < num_there; left &= left - 1) {
                int rank = __ffs(left) - 1;
                float gap = __shfl_sync(ALL, score, rank) - __shfl_sync(ALL, other, row.swaps);
                if (gap <= margin) {
                    if (lane == rank) from = row.swaps;
                    row.swaps++;
                }
            }
            int new_id = __shfl_sync(ALL, substitute, from & 31);
            float new_logit = __shfl_sync(ALL, other_logit, from & 31);
            if (from >= 0) {
                row.id = new_id;
                logit = new_logit;
            }
        }
    }
    float part;
    if constexpr (SIGMOID) {
        part = sigmoid(logit);
    } else {
        logit = clean(logit);
        float peak = __shfl_sync(ALL, logit, 0);
        if (tail_bits & 1) peak = from_key(__reduce_max_sync(ALL, picked ? order_key(logit) : 0));
        part = power_of_2((logit - peak) * LOG2_E);
    }
    row.weight = part;
    if constexpr (RENORM) {
        float total = __shfl_sync(ALL, part, 0);
#pragma unroll
        for (int rank = 1; rank < K; rank++) total += __shfl_sync(ALL, part, rank);  // in rank order
        if (SIGMOID) total += 1e-20f;
        row.weight = quotient(part, total);
    }
    if (SCALE != 1.0f) row.weight *= SCALE;
    return row;
}

extern "C" __global__ void __launch_bounds__(32)
route_fused(const LOGIT* all_logits, const float* bias, const int* slots, const float* value, const int* lo_ptr,
            const int* hi_ptr, int* own_out, int* ids_out, float* weights_out, long long* counters_out, int* error_out,
            int layer) {
    int lane = threadIdx.x;
    int at_row = blockIdx.x;
    const LOGIT* logits = all_logits + (long long)at_row * E;
    float score[PER];
    int slot[PER];
#pragma unroll
    for (int i = 0; i < PER; i += VEC) {
        int e = i * 32 + lane * VEC;
        Vector<VEC> loaded;
        Slots<VEC> where;
        bool real = E % (32 * VEC) == 0 || e < E;  // VEC divides E
        if (real) loaded = *(const Vector<VEC>*)(logits + e);
        if (real) where = *(const Slots<VEC>*)(slots + e);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            score[i + j] = real ? as_float(loaded.x[j]) : -INF;
            slot[i + j] = real ? where.x[j] : -1;
        }
    }
    float margin = 0.0f;
    int lo = 0, hi = -1;
    if (SWAP) {
        margin = __int_as_float(load_now((const int*)(value + layer)));
        lo = load_now(lo_ptr + layer);
        hi = load_now(hi_ptr + layer);
    }
    if (SIGMOID) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int e = i / VEC * VEC * 32 + lane * VEC + i % VEC;
            if (E % (32 * VEC) == 0 || e < E) score[i] = score_of(score[i], bias, e);
        }
    }
    u32 lane_key = order_key(fmaxf(greatest_of<PER>(score), -INF));  // not NaN
    float least = from_key(__reduce_min_sync(ALL, lane_key));
    float span = from_key(__reduce_max_sync(ALL, lane_key)) - least;
    int exponent = (int)(__float_as_uint(span) >> 23);  // no sign: the span is not negative, or NaN
    bool finite = exponent >= POINT - 1 && exponent < 255;
    float unit = __uint_as_float((u32)(253 + POINT - exponent) << 23);  // span * unit < 2^POINT
    u32 keys[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i / VEC * VEC * 32 + lane * VEC + i % VEC;
        float fixed = fmaxf(__fmaf_rz(score[i] - least, unit, 8388608.0f), 8388608.0f);
        u32 low = (LAST_INDEX - e) * 2 + 1 + (u32)(slot[i] >> 31);
        keys[i] = (__float_as_uint(fixed) << SHIFT) + low;
    }
    Row row = route_row<false>(keys, finite, logits, bias, slots, margin, lo, hi, lane);
    if (__any_sync(ALL, row.unsure)) row = route_row<true>(keys, finite, logits, bias, slots, margin, lo, hi, lane);
    if (row.in_error) {
        row.own = row.id = -1;
        row.weight = 0.0f;
        row.tail_cold = row.swaps = row.cold = 0;
    }
    if (lane < K) {
        int at = at_row * K + lane;
        own_out[at] = row.own;
        ids_out[at] = row.id;
        weights_out[at] = row.weight;
    }
    int counter = lane == 0 ? row.tail_cold : lane == 1 ? row.swaps : lane == 2 ? row.cold : row.cold - row.swaps;
    if (lane < 5) counters_out[at_row * 5 + lane] = lane == 4 ? 0 : counter;
    if (lane == 0) error_out[at_row] = row.in_error;
}
