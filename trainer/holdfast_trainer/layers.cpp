// What layers compute between their matrix products, each in one pass over memory: see fused_layers.py and
// product_attention.py, which call it by native.py. Contiguous tensors; counts are of elements; `threads` is
// PyTorch's, and rows are shared out by it alone, so bits repeat. Weights and what is normalised are fp32,
// T is fp32 or bf16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

namespace {

using Int = std::int64_t;

struct Half { std::uint16_t bits; };  // bf16

template <class To, class From> To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

float wide(float x) { return x; }
float wide(Half x) { return as<float>(std::uint32_t(x.bits) << 16); }

template <class T> T narrow(float x);
template <> float narrow<float>(float x) { return x; }
template <> Half narrow<Half>(float x) {  // to the nearest, of two the even one
    auto bits = as<std::uint32_t>(x);
    auto rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return {std::uint16_t(nan ? 0x7fff : rounded)};
}

// Within 2 units in the last place, of what is not too large or small for a normal number: a power of two and a
// polynomial for the rest (Cephes's expf). NaN stays NaN.
float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return as<float>(as<std::uint32_t>(p) + (std::uint32_t(std::int32_t(n)) << 23));
}

float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <class Part> void in_parts(Int count, Int threads, Part part) {
    constexpr Int size = 4096;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Int first = 0; first < count; first += size) part(first, std::min(count, first + size));
}

// Of one bf16, as it has 65,536 values: to look up what is computed of it alone takes half as long as to compute
// it. What is asked for again and again stays in the nearest cache.
template <class To> struct Table {
    template <class Compute> explicit Table(Compute compute) {
#pragma omp simd
        for (std::uint32_t bits = 0; bits < SIZE; ++bits) values[bits] = compute(wide(Half{std::uint16_t(bits)}));
    }
    To operator[](Half x) const { return values[x.bits]; }

private:
    static constexpr std::uint32_t SIZE = 1 << 16;
    To values[SIZE];
};

const Table<float> EXPONENTIAL([](float x) { return exponential(x); });

// GELU by tanh is x times the sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float SLOPE = 1.5957691216f, CUBE = 0.044715f;
float gelu_of(float x) { return x * sigmoid(SLOPE * x * (1 + CUBE * x * x)); }
float gelu_slope(float x) {
    float square = x * x, s = sigmoid(SLOPE * x * (1 + CUBE * square));
    return s + x * s * (1 - s) * SLOPE * (1 + 3 * CUBE * square);
}
const Table<Half> GELU([](float x) { return narrow<Half>(gelu_of(x)); });
const Table<float> GELU_SLOPE([](float x) { return gelu_slope(x); });
Half gelu_of(Half x) { return GELU[x]; }
float gelu_slope(Half x) { return GELU_SLOPE[x]; }

float silu(float x) { return x * sigmoid(x); }
const Table<float> SILU([](float x) { return silu(x); });
float silu(Half x) { return SILU[x]; }

template <class T> void gelu(const T* x, T* y, Int count, Int threads) {
    in_parts(count, threads, [=](Int first, Int last) {
#pragma omp simd
        for (Int i = first; i < last; ++i) y[i] = gelu_of(x[i]);
    });
}

template <class T> void gelu_back(const T* grad, const T* x, T* dx, Int count, Int threads) {
    in_parts(count, threads, [=](Int first, Int last) {
#pragma omp simd
        for (Int i = first; i < last; ++i) dx[i] = narrow<T>(wide(grad[i]) * gelu_slope(x[i]));
    });
}

// SiLU of the gate, times `up`.
template <class T> void gated(const T* gate, const T* up, T* y, Int count, Int threads) {
    in_parts(count, threads, [=](Int first, Int last) {
#pragma omp simd
        for (Int i = first; i < last; ++i) y[i] = narrow<T>(silu(gate[i]) * wide(up[i]));
    });
}

template <class T>
void gated_back(const T* grad, const T* gate, const T* up, T* dgate, T* dup, Int count, Int threads) {
    in_parts(count, threads, [=](Int first, Int last) {
#pragma omp simd
        for (Int i = first; i < last; ++i) {
            float d = wide(grad[i]), g = wide(gate[i]), s = sigmoid(g);  // to look up two would be no faster
            dgate[i] = narrow<T>(d * wide(up[i]) * s * (1 + g * (1 - s)));
            dup[i] = narrow<T>(d * g * s);
        }
    });
}

template <class T> void add(const float* x, const T* branch, float* sum, Int count, Int threads) {
    in_parts(count, threads, [=](Int first, Int last) {
#pragma omp simd
        for (Int i = first; i < last; ++i) sum[i] = x[i] + wide(branch[i]);
    });
}

// Of each row of x, to which a branch is added first, if there is one: `sum` is then what it comes to. A layer
// norm, or, where it does not `centre`, an RMS norm; `bias` may be missing. `means` and `scales`, one a row, are
// for the backward pass.
template <class T>
void norm(
    const float* x, const T* branch, const float* weight, const float* bias, float* sum, T* normed,
    float* means, float* scales, Int rows, Int width, float eps, Int centre, Int threads
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Int row = 0; row < rows; ++row) {
        const float* in = x + row * width;
        T* out = normed + row * width;
        if (branch) {
            const T* more = branch + row * width;
            float* both = sum + row * width;
#pragma omp simd
            for (Int i = 0; i < width; ++i) both[i] = in[i] + wide(more[i]);
            in = both;
        }
        float mean = 0, square = 0;
        if (centre) {
#pragma omp simd reduction(+ : mean)
            for (Int i = 0; i < width; ++i) mean += in[i];
            mean /= width;
        }
#pragma omp simd reduction(+ : square)
        for (Int i = 0; i < width; ++i) square += (in[i] - mean) * (in[i] - mean);
        float scale = 1 / __builtin_sqrtf(square / width + eps);
        means[row] = mean;
        scales[row] = scale;
        if (bias) {
#pragma omp simd
            for (Int i = 0; i < width; ++i) out[i] = narrow<T>((in[i] - mean) * scale * weight[i] + bias[i]);
        } else {
#pragma omp simd
            for (Int i = 0; i < width; ++i) out[i] = narrow<T>((in[i] - mean) * scale * weight[i]);
        }
    }
}

// `seen` is the gradient of the sum by others that read it, if any. `dbranch`, that of the branch, may be
// missing; `dweight` and `dbias` are [threads, width], each thread's share.
template <class T>
void norm_back(
    const T* grad, const float* seen, const float* x, const float* weight, const float* means,
    const float* scales, float* dx, T* dbranch, float* dweight, float* dbias, Int rows, Int width, Int centre,
    Int threads
) {
    std::fill(dweight, dweight + threads * width, 0.0f);
    std::fill(dbias, dbias + threads * width, 0.0f);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Int part = 0; part < threads; ++part) {
        float* weights = dweight + part * width;
        float* biases = dbias + part * width;
        for (Int row = rows * part / threads; row < rows * (part + 1) / threads; ++row) {
            const T* given = grad + row * width;
            const float* in = x + row * width;
            float* out = dx + row * width;
            float mean = means[row], scale = scales[row], along = 0, common = 0;
#pragma omp simd reduction(+ : along, common)
            for (Int i = 0; i < width; ++i) {
                float g = wide(given[i]), unit = (in[i] - mean) * scale, weighted = g * weight[i];
                common += weighted;
                along += weighted * unit;
                weights[i] += g * unit;
                biases[i] += g;
            }
            along /= width;
            common = centre ? common / width : 0;
#pragma omp simd
            for (Int i = 0; i < width; ++i) {
                float unit = (in[i] - mean) * scale;
                out[i] = scale * (wide(given[i]) * weight[i] - common - unit * along);
            }
            if (seen) {
                const float* more = seen + row * width;
#pragma omp simd
                for (Int i = 0; i < width; ++i) out[i] += more[i];
            }
            if (dbranch) {
                T* branch = dbranch + row * width;
#pragma omp simd
                for (Int i = 0; i < width; ++i) branch[i] = narrow<T>(out[i]);
            }
        }
    }
}

// x less what is in two more columns: its nearest bf16, and what that leaves.
void split(Half* columns, float taken) {
    Half nearest = narrow<Half>(taken);
    columns[0] = narrow<Half>(-wide(nearest));
    columns[1] = narrow<Half>(wide(nearest) - taken);
}

}  // namespace

#define OF(T, name) \
    void gelu_##name(const T* x, T* y, Int n, Int threads) { gelu(x, y, n, threads); } \
    void gelu_back_##name(const T* g, const T* x, T* dx, Int n, Int threads) { gelu_back(g, x, dx, n, threads); } \
    void gated_##name(const T* g, const T* u, T* y, Int n, Int threads) { gated(g, u, y, n, threads); } \
    void gated_back_##name(const T* grad, const T* g, const T* u, T* dg, T* du, Int n, Int threads) { \
        gated_back(grad, g, u, dg, du, n, threads); \
    } \
    void add_##name(const float* x, const T* b, float* sum, Int n, Int threads) { add(x, b, sum, n, threads); } \
    void norm_##name( \
        const float* x, const T* branch, const float* weight, const float* bias, float* sum, T* normed, \
        float* means, float* scales, Int rows, Int width, float eps, Int centre, Int threads \
    ) { \
        norm(x, branch, weight, bias, sum, normed, means, scales, rows, width, eps, centre, threads); \
    } \
    void norm_back_##name( \
        const T* grad, const float* seen, const float* x, const float* weight, const float* means, \
        const float* scales, float* dx, T* dbranch, float* dweight, float* dbias, Int rows, Int width, \
        Int centre, Int threads \
    ) { \
        norm_back( \
            grad, seen, x, weight, means, scales, dx, dbranch, dweight, dbias, rows, width, centre, threads \
        ); \
    }

extern "C" {

OF(float, float32)
OF(Half, bfloat16)

// Of a block of attention, [heads, keys, queries] both: in `p` the logarithms of the softmax, which become what
// it is, and in `ds` the gradient by it, which becomes that by the scores. No key is seen by an earlier query.
void softmax_back(Half* p, Half* ds, Int heads, Int keys, Int queries, Int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (Int row = 0; row < heads * keys; ++row) {
        Half* shares = p + row * queries;
        Half* found = ds + row * queries;
        Int first = row % keys;
        std::fill(shares, shares + first, Half{0});
        std::fill(found, found + first, Half{0});
#pragma omp simd
        for (Int i = first; i < queries; ++i) {
            float share = EXPONENTIAL[shares[i]];
            shares[i] = narrow<Half>(share);
            found[i] = narrow<Half>(share * wide(found[i]));
        }
    }
}

// From `grad` and `out`, [batch, time, heads, size], `qkv`, [batch, time, 3, heads, size], and `lse`, [batch,
// time, heads]: queries, gradients, keys and values, [batch, heads, time, size + 2] each. The product of queries
// and keys is less by lse / scale, that of gradients and values by the sum of grad * out.
void attention_parts(
    const Half* grad, const Half* qkv, const Half* out, const float* lse, Half* q, Half* g, Half* k, Half* v,
    Int batch, Int time, Int heads, Int size, float scale, Int threads
) {
    const Half one = narrow<Half>(1);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (Int b = 0; b < batch; ++b) {
        for (Int h = 0; h < heads; ++h) {
            for (Int t = 0; t < time; ++t) {
                Int from = (b * time + t) * heads + h, to = ((b * heads + h) * time + t) * (size + 2);
                const Half* query = qkv + ((b * time + t) * 3 * heads + h) * size;
                const Half* seen = grad + from * size;
                const Half* given = out + from * size;
                std::copy(query, query + size, q + to);
                std::copy(query + heads * size, query + heads * size + size, k + to);
                std::copy(query + 2 * heads * size, query + 2 * heads * size + size, v + to);
                std::copy(seen, seen + size, g + to);
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (Int i = 0; i < size; ++i) sum += wide(seen[i]) * wide(given[i]);
                split(q + to + size, lse[from] / scale);
                split(g + to + size, sum);
                std::fill(k + to + size, k + to + size + 2, one);
                std::fill(v + to + size, v + to + size + 2, one);
            }
        }
    }
}

// Gradients of queries, keys and values, [batch, heads, time, size], as one, [batch, time, 3, heads, size].
void attention_joined(
    const Half* dq, const Half* dk, const Half* dv, Half* joined, Int batch, Int time, Int heads, Int size,
    Int threads
) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (Int b = 0; b < batch; ++b) {
        for (Int t = 0; t < time; ++t) {
            for (Int h = 0; h < heads; ++h) {
                Int from = ((b * heads + h) * time + t) * size;
                Half* to = joined + ((b * time + t) * 3 * heads + h) * size;
                std::copy(dq + from, dq + from + size, to);
                std::copy(dk + from, dk + from + size, to + heads * size);
                std::copy(dv + from, dv + from + size, to + 2 * heads * size);
            }
        }
    }
}

}  // extern "C"
