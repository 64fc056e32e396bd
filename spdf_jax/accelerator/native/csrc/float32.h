// SPDX-License-Identifier: Apache-2.0
// Packing of tiles of floats, and their products with lists.
#pragma once
#include <algorithm>
#include <cstdint>

#include SPDF_SIMD

namespace spdf {
namespace {

using simd::kWidth;
using simd::Vector;

using Element = float;
constexpr int kTokens = kWidth;  // Tokens in a vector of elements.
constexpr int kAtOnce = 1;       // List entries multiplied at once.
constexpr int kForwardVectors = simd::kForwardVectors;
constexpr int kBackwardVectors = simd::kBackwardVectors;
// Terms in a block, such that its rows of a tile fit into the L1 cache.
constexpr int64_t kForwardBlock = 64;
// Prefetch distance of Pack, in features.
constexpr int64_t kFeaturesAhead = 128;
// Prefetch distance of Unpack, in results.
constexpr int64_t kResultsAhead = 64;

// Transposes `features` of a tile of tokens [tokens, stride] to [features,
// tile]; tokens beyond the last are zero.
void Pack(const float* x, int64_t stride, int64_t tokens, int64_t features,
          int tile, float* packed) {
  for (int t = 0; t < tile; t += kWidth) {
    for (int64_t c = 0; c < features; c += kWidth) {
      const int n = static_cast<int>(std::min<int64_t>(kWidth, features - c));
      Vector r[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        const float* row = x + (t + i) * stride + c;
        __builtin_prefetch(row + kFeaturesAhead, 0, 2);
        r[i] = t + i < tokens ? simd::LoadFirst(row, n) : simd::Zero();
      }
      simd::Transpose(r);
      for (int i = 0; i < n; ++i) simd::Store(packed + (c + i) * tile + t, r[i]);
    }
  }
}

// Writes the first n floats. `past_caches` uses non-temporal stores, unordered
// until the fence, for results that would be evicted before they are read.
void Write(float* p, Vector v, int n, bool past_caches) {
  if (past_caches && n == kWidth &&
      reinterpret_cast<uintptr_t>(p) % sizeof(Vector) == 0) {
    simd::Stream(p, v);
  } else {
    __builtin_prefetch(p + kResultsAhead, 1);
    simd::StoreFirst(p, v, n);
  }
}

// Transposes a tile [features, tile] back to `tokens` rows [tokens, stride].
void Unpack(const float* packed, int tile, int64_t tokens, int64_t features,
            int64_t stride, bool past_caches, float* y) {
  for (int t = 0; t < tile && t < tokens; t += kWidth) {
    for (int64_t c = 0; c < features; c += kWidth) {
      const int n = static_cast<int>(std::min<int64_t>(kWidth, features - c));
      Vector r[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        r[i] = i < n ? simd::Load(packed + (c + i) * tile + t) : simd::Zero();
      }
      simd::Transpose(r);
      for (int i = 0; i < kWidth && t + i < tokens; ++i) {
        Write(y + (t + i) * stride + c, r[i], n, past_caches);
      }
    }
  }
}

// Accumulates a block of terms in `outputs` sums of a tile:
// y[o] += value * x[index].
template <int kVectors, bool kFirst>
void AddBlock(const float* x, const float* values, const uint16_t* indices,
              const uint32_t* starts, int64_t outputs, float* y) {
  constexpr int kTile = kVectors * kWidth;
  // With few accumulators, each addition would wait for the one before, so
  // several terms have separate accumulators.
  constexpr int kApart = std::min(4, kForwardVectors / kVectors);
  for (int64_t o = 0; o < outputs; ++o, y += kTile) {
    uint32_t p = starts[o];
    const uint32_t end = starts[o + 1];
    if (!kFirst && p == end) continue;
    Vector sums[kApart][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      sums[0][v] = kFirst ? simd::Zero() : simd::Load(y + v * kWidth);
      for (int u = 1; u < kApart; ++u) sums[u][v] = simd::Zero();
    }
    for (; p + kApart <= end; p += kApart) {
#pragma GCC unroll 4
      for (int u = 0; u < kApart; ++u) {
        const float* row = x + indices[p + u] * kTile;
        const Vector value = simd::Broadcast(values + p + u);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sums[u][v] = simd::MultiplyAdd(value, simd::Load(row + v * kWidth),
                                         sums[u][v]);
        }
      }
    }
    for (; p < end; ++p) {
      const float* row = x + indices[p] * kTile;
      const Vector value = simd::Broadcast(values + p);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sums[0][v] = simd::MultiplyAdd(value, simd::Load(row + v * kWidth),
                                       sums[0][v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
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
void DifferentiateBlock(const float* dy, const float* x, const float* values,
                        const uint16_t* indices, const uint32_t* starts,
                        int64_t outputs, bool first_tile, float* dx,
                        float* sums) {
  constexpr int kTile = kVectors * kWidth;
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
    Vector here[kVectors], there[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      here[v] = simd::Load(x + v * kWidth);
      if (kWithDx) {
        there[v] = kFirst ? simd::Zero() : simd::Load(dx + v * kWidth);
      }
    }
    for (; p < end; ++p) {
      const float* row = dy + indices[p] * kTile;
      Vector value;
      if (kWithDx) value = simd::Broadcast(values + p);
      Vector product[2] = {simd::Zero(), simd::Zero()};
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vector d = simd::LoadOnce(row + v * kWidth);
        if (kWithDx) there[v] = simd::MultiplyAdd(value, d, there[v]);
        product[v & 1] = v < 2 ? simd::Multiply(here[v], d)
                               : simd::MultiplyAdd(here[v], d, product[v & 1]);
      }
      products[waiting] = simd::Add(product[0], product[1]);
      if (++waiting == kWidth) add(kWidth);
    }
    if (kWithDx) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
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

// Copies floats with non-temporal stores.
void CopyPastCaches(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const int n = static_cast<int>(std::min<int64_t>(kWidth, count - i));
    Write(to + i, simd::LoadFirst(from + i, n), n, true);
  }
}

}  // namespace
}  // namespace spdf
