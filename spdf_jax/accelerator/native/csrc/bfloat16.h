// SPDX-License-Identifier: Apache-2.0
// Packing of tiles of bfloat16, and their products with lists: two terms at
// once, with sums in floats.
//
// Rows of tiles have tokens in order; sums have the tokens of every 32 in the
// order of interleaving, see TokenOf.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include SPDF_SIMD

namespace spdf {
namespace {

using simd::kWidth;
using simd::Pairs;
using simd::Vector;

using Element = Bfloat16;
constexpr int kTokens = 2 * kWidth;  // Tokens in a vector of elements.
constexpr int kAtOnce = 2;           // List entries multiplied at once.
constexpr int kForwardVectors = 4;
constexpr int kBackwardVectors = 8;
// Terms in a block, such that its rows of a tile fit into the L1 cache.
constexpr int64_t kForwardBlock = 128;
// Prefetch distance of Pack, in features.
constexpr int64_t kFeaturesAhead = 256;
// Prefetch distance of Unpack, in results.
constexpr int64_t kResultsAhead = 128;

// Transposes `features` of a tile of tokens [tokens, stride] to [features,
// tile]; tokens beyond the last are zero.
void Pack(const Bfloat16* x, int64_t stride, int64_t tokens, int64_t features,
          int tile, Bfloat16* packed) {
  for (int t = 0; t < tile; t += kTokens) {
    for (int64_t c = 0; c < features; c += kTokens) {
      const int n = static_cast<int>(std::min<int64_t>(kTokens, features - c));
      Pairs r[2][kWidth];
      for (int half = 0; half < 2; ++half) {
        const int64_t first = t + half * kWidth;
        for (int i = 0; i < kWidth; ++i) {
          const Bfloat16* here = x + (first + i) * stride + c;
          __builtin_prefetch(here + kFeaturesAhead, 0, 2);
          r[half][i] = first + i < tokens ? simd::LoadFirstPairs(here, n)
                                          : simd::NoPairs();
        }
        simd::TransposePairs(r[half]);
      }
      for (int i = 0; i < n; ++i) {
        const auto of_pairs = i % 2 ? simd::Seconds : simd::Firsts;
        simd::StorePairs(packed + (c + i) * tile + t,
                         of_pairs(r[0][i / 2], r[1][i / 2]));
      }
    }
  }
}

// Writes the first n elements. `past_caches` uses non-temporal stores,
// unordered until the fence, for results that would be evicted before they are
// read.
void Write(Bfloat16* p, Pairs v, int n, bool past_caches) {
  if (past_caches && n == kTokens &&
      reinterpret_cast<uintptr_t>(p) % sizeof(Pairs) == 0) {
    simd::StreamPairs(p, v);
  } else {
    __builtin_prefetch(p + kResultsAhead, 1);
    simd::StoreFirstPairs(p, v, n);
  }
}

// Returns the token, of 32, in a lane of the low or the high vector of sums.
constexpr int TokenOf(int high, int lane) {
  return lane / 4 * 8 + high * 4 + lane % 4;
}

// Rounds sums of a tile and transposes them to `tokens` rows [tokens, stride].
void Unpack(const float* sums, int tile, int64_t tokens, int64_t features,
            int64_t stride, bool past_caches, Bfloat16* y) {
  for (int t = 0; t < tile && t < tokens; t += kTokens) {
    for (int64_t c = 0; c < features; c += kTokens) {
      const int n = static_cast<int>(std::min<int64_t>(kTokens, features - c));
      for (int high = 0; high < 2; ++high) {
        Vector r[2][kWidth];
        for (int i = 0; i < kTokens; ++i) {
          r[i / kWidth][i % kWidth] =
              i < n ? simd::Load(sums + (c + i) * tile + t + high * kWidth)
                    : simd::Zero();
        }
        simd::Transpose(r[0]);
        simd::Transpose(r[1]);
        for (int i = 0; i < kWidth; ++i) {
          const int64_t token = t + TokenOf(high, i);
          if (token >= tokens) continue;
          Write(y + token * stride + c, simd::Round(r[0][i], r[1][i]), n,
                past_caches);
        }
      }
    }
  }
}

// Accumulates two terms in the sums of a tile.
template <int kVectors>
void AddPair(const Bfloat16* x, const Bfloat16* values, const uint16_t* indices,
             Vector* sums) {
  constexpr int kTile = kVectors * kTokens;
  const Bfloat16* first = x + indices[0] * kTile;
  const Bfloat16* second = x + indices[1] * kTile;
  const Pairs value = simd::BroadcastPair(values);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const Pairs a = simd::LoadPairsOnce(first + v * kTokens);
    const Pairs b = simd::LoadPairsOnce(second + v * kTokens);
    sums[2 * v] =
        simd::AddProducts(simd::InterleaveLow(a, b), value, sums[2 * v]);
    sums[2 * v + 1] =
        simd::AddProducts(simd::InterleaveHigh(a, b), value, sums[2 * v + 1]);
  }
}

// Accumulates a block of terms in `outputs` sums of a tile:
// y[o] += value * x[index].
template <int kVectors, bool kFirst>
void AddBlock(const Bfloat16* x, const Bfloat16* values,
              const uint16_t* indices, const uint32_t* starts, int64_t outputs,
              float* y) {
  constexpr int kSums = 2 * kVectors;
  // With few accumulators, each addition would wait for the one before, so
  // several pairs have separate accumulators.
  constexpr int kApart = std::min(4, kForwardVectors / kVectors);
  for (int64_t o = 0; o < outputs; ++o, y += kSums * kWidth) {
    uint32_t p = starts[o];
    const uint32_t end = starts[o + 1];
    if (!kFirst && p == end) continue;
    Vector sums[kApart][kSums];
    for (int v = 0; v < kSums; ++v) {
      sums[0][v] = kFirst ? simd::Zero() : simd::Load(y + v * kWidth);
      for (int u = 1; u < kApart; ++u) sums[u][v] = simd::Zero();
    }
    for (; p + 2 * kApart <= end; p += 2 * kApart) {
#pragma GCC unroll 4
      for (int u = 0; u < kApart; ++u) {
        AddPair<kVectors>(x, values + p + 2 * u, indices + p + 2 * u, sums[u]);
      }
    }
    for (; p < end; p += 2) {
      AddPair<kVectors>(x, values + p, indices + p, sums[0]);
    }
    for (int v = 0; v < kSums; ++v) {
      Vector sum = sums[0][v];
      for (int u = 1; u < kApart; ++u) sum = simd::Add(sum, sums[u][v]);
      simd::Store(y + v * kWidth, sum);
    }
  }
}

// Accumulates a block of terms in dx of `outputs` rows, dx[o] += value *
// dy[index], and the dot products over tokens, x[o] . dy[index], in the sums of
// the entries.
template <int kVectors, bool kFirst, bool kWithDx>
void DifferentiateBlock(const Bfloat16* dy, const Bfloat16* x,
                        const Bfloat16* values, const uint16_t* indices,
                        const uint32_t* starts, int64_t outputs,
                        bool first_tile, float* dx, float* sums) {
  constexpr int kTile = kVectors * kTokens;
  constexpr int kSums = 2 * kVectors;
  Vector products[kWidth];
  int waiting = 0;
  uint32_t p = starts[0], done = p;
  auto add = [&](int n) {
    Vector sum = simd::SumLanes(products);
    if (!first_tile) {
      sum = simd::Add(sum, simd::LoadFirst(sums + done, n));
    }
    simd::StoreFirst(sums + done, sum, n);
    done += n;
    waiting = 0;
  };
  for (int64_t o = 0; o < outputs; ++o, x += kTile, dx += kTile) {
    const uint32_t end = starts[o + 1];
    if (!kFirst && p == end) continue;
    Pairs here[kVectors];
    Vector there[kSums];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      here[v] = simd::LoadPairs(x + v * kTokens);
    }
    if (kWithDx) {
#pragma GCC unroll 16
      for (int v = 0; v < kSums; ++v) {
        there[v] = kFirst ? simd::Zero() : simd::Load(dx + v * kWidth);
      }
    }
    for (; p < end; p += 2) {
      const Bfloat16* first = dy + indices[p] * kTile;
      const Bfloat16* second = dy + indices[p + 1] * kTile;
      Pairs value;
      if (kWithDx) value = simd::BroadcastPair(values + p);
      Vector product[2] = {simd::Zero(), simd::Zero()};
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Pairs a = simd::LoadPairsOnce(first + v * kTokens);
        const Pairs b = simd::LoadPairsOnce(second + v * kTokens);
        product[0] = simd::AddProducts(here[v], a, product[0]);
        product[1] = simd::AddProducts(here[v], b, product[1]);
        if (kWithDx) {
          there[2 * v] =
              simd::AddProducts(simd::InterleaveLow(a, b), value, there[2 * v]);
          there[2 * v + 1] = simd::AddProducts(simd::InterleaveHigh(a, b),
                                               value, there[2 * v + 1]);
        }
      }
      products[waiting] = product[0];
      products[waiting + 1] = product[1];
      waiting += 2;
      if (waiting == kWidth) add(kWidth);
    }
    if (kWithDx) {
#pragma GCC unroll 16
      for (int v = 0; v < kSums; ++v) {
        simd::Store(dx + v * kWidth, there[v]);
      }
    }
  }
  if (waiting) {
    const int n = waiting;
    for (int i = n; i < kWidth; ++i) products[i] = simd::Zero();
    add(n);
  }
}

// Rounds floats and writes them with non-temporal stores.
void CopyPastCaches(const float* from, int64_t count, Bfloat16* to) {
  for (int64_t i = 0; i < count; i += kTokens) {
    const int n = static_cast<int>(std::min<int64_t>(kTokens, count - i));
    const Vector low = simd::LoadFirst(from + i, std::min(n, kWidth));
    const Vector high = n > kWidth
                            ? simd::LoadFirst(from + i + kWidth, n - kWidth)
                            : simd::Zero();
    Write(to + i, simd::Round(low, high), n, true);
  }
}

}  // namespace
}  // namespace spdf
