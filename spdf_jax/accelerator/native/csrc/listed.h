// SPDX-License-Identifier: Apache-2.0
// The product of few tokens with a matrix that is stored as lists.
//
// Every kept weight adds a multiple of one input of all tokens to one output.
// Inputs are therefore packed to rows of a tile of tokens, and the tokens are
// the lanes of vectors; a single token is read where it is.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "kernels.h"
#include "scratch.h"
#include SPDF_SIMD

namespace spdf {
namespace {

// Separate sums of an output, because an addition waits for the previous one to
// the same sum. Equal for any number of tokens, on which the results of a token
// therefore do not depend.
constexpr int kSums = 8;
constexpr int kMostLanes = simd::kWidth;
// Smallest number of products in a part that a worker computes.
constexpr int64_t kPartProducts = 1 << 15;
constexpr int64_t kPartsPerWorker = 4;

// Vectors of n floats, which compilers divide into those of the processor.
template <int n>
struct Lanes {
  typedef float Vector __attribute__((vector_size(n * sizeof(float))));
};

inline float Widen(float value) { return value; }
inline float Widen(Bfloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Computes outputs `begin` to `end` of `tokens` <= kLanes tokens, whose inputs
// are x[inputs, kLanes].
template <int kLanes, typename Value>
struct Outputs {
  static void Compute(const ListedMatrix<Value>& w, const float* x,
                      int64_t begin, int64_t end, int64_t tokens, float* y) {
    using Vector = typename Lanes<kLanes>::Vector;
    for (int64_t o = begin; o < end; ++o) {
      Vector sums[kSums] = {};
      const auto add = [&](int64_t p, int sum) {
        Vector row;
        std::memcpy(&row, x + int64_t{w.indices[p]} * kLanes, sizeof row);
        sums[sum] += Widen(w.values[p]) * row;
      };
      int64_t p = w.starts[o];
      const int64_t last = w.starts[o + 1];
      for (; p + kSums <= last; p += kSums) {
#pragma GCC unroll 8
        for (int i = 0; i < kSums; ++i) add(p + i, i);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kSums - 1; ++i) {
        if (p + i < last) add(p + i, i);
      }
      const Vector sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
                         ((sums[4] + sums[5]) + (sums[6] + sums[7]));
      float lanes[kLanes];
      std::memcpy(lanes, &sum, sizeof lanes);
      for (int64_t t = 0; t < tokens; ++t) y[t * w.outputs + o] = lanes[t];
    }
  }
};

// One token: the lanes are the sums.
template <typename Value>
struct Outputs<1, Value> {
  using Vector = Lanes<kSums / 2>::Vector;

  // Adds the products of the first n of kSums entries. All entries are read,
  // because a loop over few would mispredict a branch for every output.
  static void Add(const Value* v, const uint16_t* indices, const float* x,
                  int n, Vector* low, Vector* high) {
    typedef int Lane __attribute__((vector_size(sizeof(Vector))));
    // Two loads of four indices each, because loads limit this loop.
    static_assert(kSums == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
    uint64_t four[2];
    std::memcpy(four, indices, sizeof four);
    const auto row = [&](int i) {
      return x[static_cast<uint16_t>(four[i / 4] >> i % 4 * 16)];
    };
    Vector low_values = {Widen(v[0]), Widen(v[1]), Widen(v[2]), Widen(v[3])};
    Vector high_values = {Widen(v[4]), Widen(v[5]), Widen(v[6]), Widen(v[7])};
    Vector low_row = {row(0), row(1), row(2), row(3)};
    Vector high_row = {row(4), row(5), row(6), row(7)};
    if (n < kSums) {
      const Lane in_low = Lane{0, 1, 2, 3} < n, in_high = Lane{4, 5, 6, 7} < n;
      low_values = in_low ? low_values : Vector{};
      high_values = in_high ? high_values : Vector{};
      low_row = in_low ? low_row : Vector{};
      high_row = in_high ? high_row : Vector{};
    }
    *low += low_values * low_row;
    *high += high_values * high_row;
  }

  static void Compute(const ListedMatrix<Value>& w, const float* x,
                      int64_t begin, int64_t end, int64_t, float* y) {
    for (int64_t o = begin; o < end; ++o) {
      const Value* v = w.values + w.starts[o];
      const uint16_t* indices = w.indices + w.starts[o];
      int left = w.starts[o + 1] - w.starts[o];
      Vector low = {}, high = {};
      for (; left >= kSums; left -= kSums, v += kSums, indices += kSums) {
        Add(v, indices, x, kSums, &low, &high);
      }
      Add(v, indices, x, left, &low, &high);
      y[o] = ((low[0] + low[1]) + (low[2] + low[3])) +
             ((high[0] + high[1]) + (high[2] + high[3]));
    }
  }
};

// Calls f with the smallest number of lanes for the tokens, as a compile-time
// constant.
template <int kLanes = 1, typename F>
void WithLanes(int64_t tokens, const F& f) {
  if constexpr (kLanes < kMostLanes) {
    constexpr int kNext = kLanes == 1 ? 4 : kLanes * 2;
    if (tokens > kLanes) return WithLanes<kNext>(tokens, f);
  }
  f(std::integral_constant<int, kLanes>());
}

template <typename Value>
void CheckStarts(const ListedMatrix<Value>& w) {
  bool ascends = w.starts[0] >= 0 && w.starts[w.outputs] + kSums <= w.size;
  for (int64_t o = 0; o < w.outputs; ++o) {
    ascends &= w.starts[o] <= w.starts[o + 1];
  }
  if (!ascends) {
    throw std::length_error("the starts of the lists do not ascend to at most "
                            "the number of values without the padding");
  }
}

// Transposes the inputs of `tokens` tokens; inputs of missing ones are zero.
inline void PackInputs(const float* x, int64_t inputs, int64_t tokens,
                       int64_t lanes, float* packed) {
  if (lanes < simd::kWidth) {
    for (int64_t k = 0; k < inputs; ++k, packed += lanes) {
      for (int64_t t = 0; t < tokens; ++t) packed[t] = x[t * inputs + k];
      std::fill(packed + tokens, packed + lanes, 0.f);
    }
    return;
  }
  for (int64_t k = 0; k < inputs; k += simd::kWidth) {
    const int n = static_cast<int>(std::min<int64_t>(simd::kWidth, inputs - k));
    simd::Vector rows[simd::kWidth];
    for (int t = 0; t < simd::kWidth; ++t) {
      rows[t] = t < tokens ? simd::LoadFirst(x + t * inputs + k, n)
                           : simd::Zero();
    }
    simd::Transpose(rows);
    for (int i = 0; i < n; ++i) {
      simd::Store(packed + (k + i) * simd::kWidth, rows[i]);
    }
  }
}

template <typename Value>
void MultiplyListedMatrix(const Workers& workers, const float* x,
                          const ListedMatrix<Value>& w, int64_t tokens,
                          float* y) {
  CheckStarts(w);
  static thread_local Scratch room;
  const int64_t tiles = (tokens + kMostLanes - 1) / kMostLanes;
  float* packed = room.Get<float>(tiles * kMostLanes * w.inputs);
  const int64_t products = tokens * (w.starts[w.outputs] - w.starts[0]);
  const int64_t parts = std::max<int64_t>(
      1, std::min({w.outputs, products / kPartProducts,
                   workers.number > 1 ? workers.number * kPartsPerWorker : 1}));
  const auto for_tiles = [&](const auto& f) {
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = i * kMostLanes;
      const int64_t here = std::min<int64_t>(kMostLanes, tokens - first);
      WithLanes(here, [&](auto lanes) {
        f(lanes, x + first * w.inputs, packed + first * w.inputs, here,
          y + first * w.outputs);
      });
    }
  };
  for_tiles([&](auto lanes, const float* rows, float* to, int64_t here,
                float*) {
    if (lanes() > 1) PackInputs(rows, w.inputs, here, lanes(), to);
  });
  workers.parallel_for(parts, [&](int64_t part) {
    const int64_t begin = w.outputs * part / parts;
    const int64_t end = w.outputs * (part + 1) / parts;
    for_tiles([&](auto lanes, const float* rows, const float* to, int64_t here,
                  float* results) {
      Outputs<lanes(), Value>::Compute(w, lanes() > 1 ? to : rows, begin, end,
                                       here, results);
    });
  });
}

}  // namespace
}  // namespace spdf
